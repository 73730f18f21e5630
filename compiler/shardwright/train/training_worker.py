"""Run one rank under its launcher: the compiled folder's train.py calls main()."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardwright.diagnostics import Refusal
from shardwright.diagnostics.file_errors import NO_SPACE, file_error_refusal
from shardwright.engines.trainer_protocol import engine_runtime
from shardwright.monitor.rank_events import RankFailed, event_object, is_secondary_failure
from shardwright.monitor.rank_monitor import RankMonitor
from shardwright.monitor.run_files import read_attempt_record, write_json
from shardwright.plan.folder_paths import SCORE_FILE
from shardwright.plan.plan import Plan, read_plan
from shardwright.recipe.plain_secrets import secrets_of_plan
from shardwright.train.numa_affinity import bind_to_numa_node
from shardwright.train.run_attempt import (
    RANKS,
    acquire_lease_on_rank_0,
    check_no_other_run,
    new_run_lease,
)
from shardwright.train.secret_environment import restart_with_secret_environment, secret_redactor
from shardwright.utils.host_memory import keep_freed_memory
from shardwright.utils.installation import silence_torchao
from shardwright.utils.run_lease import Lease

if TYPE_CHECKING:
    import torch

    from shardwright.train.training_session import Session


def leave(status: int) -> NoReturn:
    """End the process with this exit status, after the registered exit functions.

    Not the interpreter's own exit: a thread of gloo's may still hold the last collective's tensors,
    and dropping them needs the interpreter. Where that is torn down already, the process dies by
    SIGABRT, and a launcher takes a finished run for a failed one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


SECONDARY_FAILURE_DELAY_SECONDS = 4.0


def main() -> NoReturn:
    """Train as plan.json and run/attempt.json say. The working directory is not relied on."""
    unsent = restart_with_secret_environment()
    silence_torchao()
    folder = Path(sys.argv[0]).resolve().parent
    stop = StopRequest(folder)
    rank = int(os.environ["RANK"])
    (folder / "run").mkdir(exist_ok=True)  # launch.sh by hand, in a fresh folder
    number = read_attempt_record(folder).number or 1
    output = os.dup(1)
    if rank != 0:
        _redirect_output(folder / "run" / "logs" / f"rank-{rank:05d}.log")
    plan = read_plan(folder)
    watch = RankMonitor(plan, folder, rank, number, output)
    lease = new_run_lease(plan, folder, RANKS) if rank == 0 else None
    try:
        if unsent is not None:
            raise unsent
        if not plan.is_cpu:
            bind_to_numa_node(int(os.environ.get("LOCAL_RANK", "0")))
        status = _train(plan, folder, rank, watch, lease, stop)
    except BaseException as error:
        if rank != 0:
            with contextlib.suppress(OSError):
                traceback.print_exc()  # into its own log; rank 0's is what the user watches
        event = _failure_event(plan, folder, rank, error)
        if event.code != "SW6006":  # the folder is another run's
            with contextlib.suppress(OSError):  # a full disk: rank 0 and the launcher are told
                write_json(
                    folder / "run" / "errors" / f"rank-{rank:05d}.json",
                    {"attempt": watch.attempt, **event_object(event)},
                )
        watch.failed(event)
        if is_secondary_failure(str(error)):
            # Let the launcher, which polls once a second, see the killed process before this one.
            time.sleep(SECONDARY_FAILURE_DELAY_SECONDS)
        # Not the interpreter's exit: a collective that other ranks are in could block it for
        # minutes.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        if lease is not None:
            lease.release()
        os._exit(1)
    leave(status)


def _redirect_output(path: Path) -> None:
    """Append standard output and error to a log that other users cannot read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _failure_event(plan: Plan, folder: Path, rank: int, error: BaseException) -> RankFailed:
    """Describe the failure; the earliest is the cause, the others are secondary.

    The launcher ends every rank once one is down.
    """
    if isinstance(error, OSError):
        if error.errno in NO_SPACE and error.filename is None:  # of the rank's own output, say
            error.filename = str(folder / "run")
        error = file_error_refusal(error) or error
    if isinstance(error, Refusal):
        first = error.diagnostics[0]
        cause, code, help_text = first.message, first.code, first.help
    else:
        cause, code, help_text = f"{type(error).__name__}: {error}", "SW6301", ""
    blot = secret_redactor(plan.launch.env_from, secrets_of_plan(plan.launch, plan.checkpoint))
    return RankFailed(
        rank=rank,
        host=socket.gethostname(),
        stage=plan.ranks[rank].pipeline if rank < len(plan.ranks) else None,
        code=code,
        cause=blot(cause),
        help=help_text,
        traceback=blot(traceback.format_exc()),
    )


def _train(
    plan: Plan,
    folder: Path,
    rank: int,
    watch: RankMonitor,
    lease: Lease | None,
    stop: StopRequest,
) -> int:
    """Train, and return the exit code: 0, or what a scheduler expects of a preempted run.

    lease: rank 0's
    """
    runtime = engine_runtime(plan)
    if plan.is_cpu:
        keep_freed_memory()
    runtime.prepare_process(plan, user_training_loop=False)
    from shardwright.train.host_consistency import check_world

    check_world(plan)
    resume: str | None = os.environ.get("SHARDWRIGHT_RESUME", "auto")
    if lease is None:
        check_no_other_run(plan, folder, rank)
    elif acquire_lease_on_rank_0(lease, folder):
        resume = None
    watch.join()
    watch.at("connecting to the other ranks", 0)
    if (folder / SCORE_FILE).is_file():
        from shardwright.train.scoring import score

        score(plan, folder, rank, resume, lease, watch, stop)
        watch.leave()
        runtime.close_groups()
        return 0
    from shardwright.train.training_session import begin_session

    session = begin_session(plan, folder, rank, resume, lease, watch)
    status = train_steps(session, watch, stop)
    session.finish(status)
    watch.leave()
    runtime.close_groups()
    return int(os.environ.get("SHARDWRIGHT_PREEMPTED_EXIT", "0")) if status == "preempted" else 0


def train_steps(session: Session, watch: RankMonitor, stop: StopRequest) -> str:
    """Train every step that is left. Return done or preempted."""
    last, status = session.steps().stop - 1, "done"
    _evaluate(
        session, watch
    )  # of the step that is resumed from, where an earlier attempt failed in it
    while session.done < last:  # an island that was behind goes on from another one's step
        watch.at(f"in step {session.done + 1}", session.done)
        session.train(session.done + 1)
        if session.saves or session.done == last:
            # Before the evaluation, which may fail: a run that resumes from here makes it then.
            watch.at(f"saving step {session.done}", session.done)
            session.save()
        _evaluate(session, watch)
        if session.done < last and stop.agreed(session.device):
            status = "preempted"
            break
    watch.at("saving its last step", session.done)
    session.save(last=True)
    return status


def _evaluate(session: Session, watch: RankMonitor) -> None:
    if session.evaluates:
        watch.at(f"evaluating step {session.done}", session.done)
        session.evaluate()


class StopRequest:
    """Detect preemption, by run/stop, SIGUSR1 or SIGTERM to any rank; all ranks see it in the same
    step."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "run" / "stop"
        self.signalled = False
        signal.signal(signal.SIGUSR1, self._on_signal)
        # Blocked for every thread to come: only sigwaitinfo tells who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._await_sigterm, args=(os.getppid(),), daemon=True).start()

    def _on_signal(self, *_: object) -> None:
        self.signalled = True

    def _await_sigterm(self, parent: int) -> None:
        """Take SIGTERM for a request to stop, except from the launcher that started this rank.

        That one ends its ranks when another one has failed: nothing can be saved any more.
        """
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            self.signalled = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, device: torch.device) -> bool:
        """Return whether any rank was told to stop. Collective."""
        import torch
        from torch import distributed as dist

        asked = self.signalled or (os.environ["RANK"] == "0" and self.file.exists())
        flag = torch.tensor([float(asked)], device=device)
        dist.all_reduce(flag)
        return bool(flag.item())
