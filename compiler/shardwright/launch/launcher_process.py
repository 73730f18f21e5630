"""`run`: starts the real `deepspeed` launcher on a compiled folder, streams rank 0, and tells how
it ended.

Runs in the user's shell: no torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tqdm import tqdm

from shardwright.checkpoint.checkpoint_storage import CheckpointStore
from shardwright.checkpoint.resume_checkpoint import (
    choose_checkpoint,
    is_after_outer_step,
    print_resume_notes,
)
from shardwright.checkpoint.run_attempts import last_attempt_number, move_to_attempt, record_end
from shardwright.data.data_preparation import MAX_UNPREPARED_BYTES, prepare
from shardwright.data.dataset import resolve
from shardwright.data.score_digests import (
    check_same_tokenizer,
    reference_digests,
    reference_score_file,
    teacher_digests,
)
from shardwright.data.score_files import ScoreFile
from shardwright.diagnostics import Refusal, refusal
from shardwright.diagnostics.file_errors import file_error_refusal
from shardwright.launch.launchers.job_scheduler import submit
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.launch.preflight_checks import check_preflight, check_versions
from shardwright.launch.run_state import (
    ended_by_signal,
    is_alive,
    port_was_taken,
    report_failure,
    report_stall,
)
from shardwright.monitor.rank_events import RunNotice, RunStalled, parse_event
from shardwright.monitor.run_files import (
    PROGRESS,
    evaluated_step,
    number,
    read_attempt_record,
    read_status,
    write_status,
)
from shardwright.plan.folder_paths import SCORE_FILE
from shardwright.plan.hostfile import read_hostfile
from shardwright.plan.plan import Plan, load_plan
from shardwright.recipe.plain_secrets import secrets_of_plan
from shardwright.recipe.recipe_types import weights_summary
from shardwright.train.host_consistency import check_folder_digests
from shardwright.train.run_attempt import begin_attempt, check_no_supervisor, hold_run_lease
from shardwright.train.secret_environment import secret_redactor
from shardwright.utils.child_processes import (
    end_processes,
    free_port,
    kill_tree,
    program_path,
    shardwright_command,
)
from shardwright.utils.file_io import read_regular_text_file

# Rank 0's progress: a bar on a terminal, plain lines in a log.


PLAIN_SECONDS = 2.0
"""Limits plain progress to one line in this time. The first and the last step are always
printed."""


class TrainingProgress:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar = (
            tqdm(total=steps, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None
        )
        self._last = 0.0

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, text: str) -> None:
        """text: one line of metrics.jsonl."""
        m = json.loads(text)
        figures = (
            f"loss {number(m['loss']):.4f}  grad_norm {number(m['grad_norm']):.3f}  lr "
            f"{m['learning_rate']:.2e}  {m['tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.n = m["step"]
            self._bar.set_postfix_str(figures)
            return
        now = time.monotonic()
        if m["step"] in (1, self.steps) or now - self._last >= PLAIN_SECONDS:
            self._last = now
            print(f"step {m['step']}/{self.steps}  {figures}", flush=True)

    def note(self, line: str) -> None:
        """A line of rank 0's own output."""
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)


INTERRUPT_GRACE_SECONDS = 10.0
HOST_GRACE_SECONDS = 15.0
"""Separates the end of one host's ranks from the end of all. Ranks that have met end themselves
sooner."""
TASK_GRACE_SECONDS = 5.0
"""Leaves srun the time to kill the ranks on nodes that answer."""
STALL_GRACE_SECONDS = 2.0
"""Leaves rank 0 the time to write who is the suspect into run/status.json."""

MISSING_DATA_CODES = ("SW6101", "SW6102", "SW6119")
"""Data that is not where the plan says."""

SSH_OPTIONS = "-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 -oServerAliveCountMax=3"
"""Never a question, and a host that went away is noticed. The user's own options stand first, and
so win."""

_HOST_FAILED = re.compile(r"pdsh@\S+: \S+: ssh exited with exit code [1-9]")
_TASK_FAILED = re.compile(r"srun: error: \S+: tasks? \S+: ")
"""Matches srun's line on a rank that failed. `--kill-on-bad-exit` kills the others then, but srun
waits for those of a lost node until SlurmdTimeout (300 s)."""

_LAUNCHER_NOISE = re.compile(
    r"(\S+: )?("  # pdsh's prefix, the host
    + "|".join(
        (
            r"\[20\d\d-",  # DeepSpeed's and torch's log lines
            r"(MA|CPU Virtual Memory:|before|after|begin|end) ",  # DeepSpeed's memory reports
            # PipelineModule's construction
            r"(Using topology:|SEED_LAYERS=|stage=\d|\s+\d+: \w+$|  loss: )",
            r"(\[Gloo\]|Rank: |\[rank\d+\]:\[W|W\d{4} )",
            r"(rank \d+ ends: |pdsh@|(Connection to|client_loop:) )",
        )
    )
    + ")"
)
"""Matches log lines of DeepSpeed and torch that go to run/launcher.log and not to the terminal."""


MAX_UNLOGGED_LINES = 10_000
MAX_PORT_ATTEMPTS = 3
"""Starts with `launch.master_port: auto`, each with a port that is free at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Hold what a supervisor shares with the attempt that it starts.

    ends_on_stall: end an attempt that has stalled
    stop_requested: set where this process is asked to stop
    ended_ranks: token of the lease that the last attempt's ranks left, where they have ended
    """

    ends_on_stall: bool
    stop_requested: threading.Event
    ended_ranks: str | None = None


def run_folder(
    folder: Path, hostfile: Path | None, resume: str, supervision: Supervision | None = None
) -> int:
    """resume: auto | never | a step folder. Returns the exit code: 0 done or preempted, 1 refused,
    3 not finished."""
    plan = load_plan(folder)
    if supervision is None:
        check_no_supervisor(folder)
    for warning in check_versions(plan):
        print(warning, file=sys.stderr)
    check_preflight(plan, folder, hostfile)
    check_folder_digests(plan, folder)
    (folder / "run").mkdir(exist_ok=True)
    plan = _prepare_data(plan, folder)
    _check_teacher(plan, folder)
    if failure := _score_reference(plan, folder, hostfile):
        return failure
    if LAUNCHERS[plan.launch.launcher].submits:
        return submit(plan, folder, resume)
    ended_ranks = None if supervision is None else supervision.ended_ranks
    with _lock(folder) as lock, contextlib.ExitStack() as leases:
        lease = leases.enter_context(hold_run_lease(plan, folder, ended_ranks))
        chosen = choose_checkpoint(plan, folder, resume)
        print_resume_notes(chosen)
        if chosen is None and not _is_scoring(folder):
            print(f"starts from {weights_summary(plan.model.weights)}")
        # Its last step was saved, and then the validation failed or the outer store was away.
        owes = chosen is not None and (
            (plan.validation is not None and evaluated_step(folder) < plan.training.steps)
            or (plan.islands > 1 and not is_after_outer_step(chosen.path))
        )
        if chosen and chosen.step >= plan.training.steps and not owes:
            print(
                f"already trained to its last step: {chosen.path} (`--resume never` starts again)"
            )
            # Its copy failed, which ended that run with an error.
            store = plan.checkpoint.upload_to and CheckpointStore(plan.checkpoint.upload_to)
            if store and store.copy_missing(chosen.path):
                print(f"copied       {chosen.path.name} to {store.shown_url}")
            return 0
        hosts = _hosts(plan, folder, hostfile)
        for port in range(1, MAX_PORT_ATTEMPTS + 1):
            if port > 1:  # rank 0 took the lease over, and gave it up when it ended
                lease = leases.enter_context(hold_run_lease(plan, folder, lease.owner.token))
            attempt = begin_attempt(
                plan, folder, chosen, fresh=resume == "never", lease=lease.owner.token, hosts=hosts
            ).number
            code: int | None = None
            try:
                end = _launch(plan, folder, hostfile, attempt, lock, supervision)
                code = end.code
                if port == MAX_PORT_ATTEMPTS or not port_was_taken(plan, folder / "run"):
                    return _tell_end(plan, folder, attempt, end)
                cause = "another process took the run's port"
                write_status(folder, "failed", attempt, rank=0, code="SW6302", cause=cause)
                print(f"{cause}: starting again with another port")
            finally:
                with contextlib.suppress(OSError):  # the next attempt adds it
                    record_end(plan, folder, code, ended_by_signal(folder, code))
        raise AssertionError("the last try returns")


def _check_teacher(plan: Plan, folder: Path) -> None:
    """Check the score file of a distillation. Raises Refusal: SW6270, SW6271, SW6276."""
    teacher = plan.training.objective.teacher
    if teacher is None or LAUNCHERS[plan.launch.launcher].has_separate_filesystem:
        return
    if not Path(teacher).exists():
        raise refusal(
            "SW6276",
            f"the teacher's score file {teacher!r} does not exist",
            f"Run `shardwright score {shlex.quote(str(folder))} --weights TEACHER --top 32 -o "
            f"{shlex.quote(teacher)}` with the teacher's folder, then this again.",
        )
    ScoreFile(teacher).check(teacher_digests(plan, folder))


def _score_reference(plan: Plan, folder: Path, hostfile: Path | None) -> int:
    """Score the data under another model than the recipe's, where it is the reference and has no
    scores yet. Returns the exit code. Raises Refusal: SW6270, SW6271, SW6274, SW6275."""
    reference = plan.training.objective.reference
    launcher = LAUNCHERS[plan.launch.launcher]
    if reference is None or _is_scoring(folder) or launcher.has_separate_filesystem:
        return 0
    path = reference_score_file(plan, folder)
    if path == Path(reference):
        ScoreFile(path).check(reference_digests(plan, folder))
        return 0
    check_same_tokenizer(plan, folder, reference)
    if path.is_dir():
        return 0
    if launcher.submits:
        raise refusal(
            "SW6274",
            f"the reference {reference!r} has no scores yet, and {plan.launch.launcher} starts one "
            "job",
            f"Run `shardwright score {shlex.quote(str(folder))} --weights {shlex.quote(reference)} "
            f"-o {shlex.quote(str(path))}` first, then this again.",
        )
    print(f"reference    {reference}: scored before the first step", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    hosts = ["--hostfile", str(hostfile)] if hostfile else []
    return subprocess.run(
        shardwright_command("score", str(folder), "--weights", reference, "-o", str(path), *hosts),
        check=False,
    ).returncode


def _is_scoring(folder: Path) -> bool:
    """Return whether the ranks score the data instead of training."""
    return (folder / SCORE_FILE).is_file()


def _tell_end(plan: Plan, folder: Path, attempt: int, end: LauncherEnd) -> int:
    """Print how the attempt ended; return the exit code. The launcher's own proves nothing: it is 0
    when launch.py dies by a signal."""
    status = read_status(folder)
    if status.attempt == attempt and status.status in ("done", "preempted"):
        if _is_scoring(folder):
            return 0
        print(f"{status.status} at step {status.step} of {plan.training.steps}")
        print(f"metrics      {folder / 'run' / 'metrics.jsonl'}")
        print(f"checkpoints  {folder / plan.checkpoint.directory}")
        return 0
    if end.stall is not None:
        return report_stall(folder, attempt, end.stall)
    return report_failure(plan, folder, attempt, end.code, end.unlogged)


def _hosts(plan: Plan, folder: Path, hostfile: Path | None) -> list[str]:
    """Return the hosts of a run; [] where they are chosen elsewhere."""
    if plan.nodes == 1:
        return [socket.gethostname()]
    path = hostfile or folder / "launch" / "hostfile"
    try:
        text = read_regular_text_file(path)
        return [
            each.name for each in read_hostfile(str(path), text, plan.nodes, plan.gpus_per_node)
        ]
    except (OSError, ValueError, Refusal):
        return []


def _prepare_data(plan: Plan, folder: Path) -> Plan:
    """Before anything that costs GPU time is started; the plan with its epochs counted. Raises
    Refusal."""
    launcher = LAUNCHERS[plan.launch.launcher]
    if launcher.has_separate_filesystem:
        return plan  # the pods have volumes of their own
    try:
        prepare(plan, folder, limit_bytes=MAX_UNPREPARED_BYTES)
        return resolve(plan, folder)[0]
    except Refusal as refusal:
        # Where the ranks run elsewhere, the data may be there alone; they look for themselves.
        elsewhere = plan.nodes > 1 or launcher.submits
        if elsewhere and all(d.code in MISSING_DATA_CODES for d in refusal.diagnostics):
            return plan
        raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[int]:
    """Held by its file descriptor, which the launcher inherits: an orphaned launcher still counts
    as alive."""
    with (folder / "run" / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise run_alive_refusal(folder) from None
        yield file.fileno()


def run_alive_refusal(folder: Path) -> Refusal:
    return refusal(
        "SW6006",
        f"another `shardwright run` of {str(folder)!r} is alive",
        (
            "`shardwright status` shows the run's state; `shardwright stop` saves a "
            "checkpoint and ends the run."
        ),
    )


def command(plan: Plan, hostfile: Path | None) -> list[str]:
    """The compiled folder's own launch.sh, from that folder: a run by hand and a run from here are
    the same."""
    return ["bash", "launch.sh", *([str(hostfile.resolve())] if hostfile else [])]


class LauncherEnd(NamedTuple):
    """code: the launcher's. unlogged: the end of its output, where launcher.log could not be
    written. stall: the event for which a supervised run was ended."""

    code: int
    unlogged: str = ""
    stall: RunStalled | None = None


def _launch(
    plan: Plan,
    folder: Path,
    hostfile: Path | None,
    attempt: int,
    lock: int,
    supervision: Supervision | None,
) -> LauncherEnd:
    """Streams until the launcher ends. SIGUSR1 and SIGTERM ask the ranks to save and stop."""

    def ask_to_stop(*_: object) -> None:
        if supervision is not None:
            supervision.stop_requested.set()
        try:
            (folder / "run" / "stop").touch()
        except OSError as error:
            print(f"cannot ask the run to stop: {error}", file=sys.stderr, flush=True)

    interrupts: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        # Our own handler: a background job starts with SIGINT ignored, and the launcher listens to
        # it all the same. Remembered as well as raised: an exception in the wrong place (a
        # finalizer) is swallowed by Python.
        interrupts.append(number)
        raise KeyboardInterrupt

    previous = {s: signal.signal(s, ask_to_stop) for s in (signal.SIGUSR1, signal.SIGTERM)}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, on_interrupt)
    # A session of its own: a terminal's interrupt comes here alone. Under pdsh DeepSpeed's handler
    # would answer it with a remote pkill, which also ends other runs on these hosts.
    process = subprocess.Popen(
        command(plan, hostfile),
        cwd=folder,
        env={
            "PYTHONWARNINGS": "ignore::FutureWarning",  # of torch, about DeepSpeed's calls
            **os.environ,
            "PATH": program_path(),
            "PDSH_SSH_ARGS_APPEND": (
                f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}"
            ).strip(),
            "MASTER_PORT": str(free_port()),
        },
        pass_fds=[lock],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        ends_on_stall = supervision is not None and supervision.ends_on_stall
        unlogged, stall = _stream(process, plan, folder, ends_on_stall=ends_on_stall)
        code = process.wait()
        if interrupts:
            raise KeyboardInterrupt
        return LauncherEnd(code=code, unlogged=unlogged, stall=stall)
    except KeyboardInterrupt:
        end_processes([process], LAUNCHERS[plan.launch.launcher].interrupt, INTERRUPT_GRACE_SECONDS)
        with contextlib.suppress(OSError):
            write_status(folder, "failed", attempt, rank=None, cause="interrupted")
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stream(
    process: subprocess.Popen[str], plan: Plan, folder: Path, *, ends_on_stall: bool = False
) -> tuple[str, RunStalled | None]:
    """Everything into run/launcher.log, what a person wants to see to the terminal. Returns what
    could not be written there: a full disk does not end the run.

    ends_on_stall: end the launcher where the run has stalled, and return that event too
    """
    assert process.stdout is not None
    kill_timer: threading.Timer | None = None
    stall: RunStalled | None = None
    blot = secret_redactor(plan.launch.env_from, secrets_of_plan(plan.launch, plan.checkpoint))
    path = folder / "run" / "launcher.log"
    path.unlink(missing_ok=True)  # a file that stands there may be readable to all
    unlogged: deque[str] = deque(maxlen=MAX_UNLOGGED_LINES)
    with (
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0) as file,
        TrainingProgress(plan.training.steps) as progress,
    ):
        for text in map(blot, process.stdout):
            try:
                if not unlogged:
                    file.write(text.encode("utf-8", "backslashreplace"))
            except OSError as error:
                error.filename = error.filename or str(path)
                if (refused := file_error_refusal(error)) is None:
                    raise
                progress.note(f"warning[SW6323]: {refused.diagnostics[0].message}")
                unlogged.append("\n")
            if unlogged:
                unlogged.append(text)
            if _HOST_FAILED.match(text) and kill_timer is None:
                # Its ranks told the others, unless they never met.
                kill_timer = _kill_later(process, HOST_GRACE_SECONDS)
            if _TASK_FAILED.match(text) and kill_timer is None:
                kill_timer = _kill_later(process, TASK_GRACE_SECONDS)
            event = parse_event(text)
            if ends_on_stall and stall is None and isinstance(event, RunStalled):
                stall = event
                kill_timer = kill_timer or _kill_later(process, STALL_GRACE_SECONDS)
            if PROGRESS in text:
                progress.show(text.split(PROGRESS, 1)[1])
            elif event is not None:
                if isinstance(event, RunStalled | RunNotice) and event.text:
                    progress.note(f"warning[SW6303]: {event.text}")
            elif text.strip() and not _LAUNCHER_NOISE.match(text):
                progress.note(text.rstrip())
    if kill_timer is not None:
        kill_timer.cancel()
    return "".join(unlogged), stall


def _kill_later(process: subprocess.Popen[str], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, kill_tree, [process])
    timer.daemon = True
    timer.start()
    return timer


# `run --detach`: the same command in a session of its own, which no terminal and no ssh session
# takes down.


POLL_SECONDS = 0.2


def run_detached(folder: Path, hostfile: Path | None, resume: str, *options: str) -> int:
    """Returns once the run has passed its checks: 0, or the exit code of one that did not. options:
    further ones of `run`."""
    plan, before = load_plan(folder), read_attempt_record(folder).number
    if is_alive(folder):
        raise run_alive_refusal(folder)
    log = folder / "run" / "logs" / "run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    hosts = ["--hostfile", str(hostfile)] if hostfile else []
    move_to_attempt(folder, last_attempt_number(folder), log)
    with log.open("w") as file:
        process = subprocess.Popen(
            shardwright_command("run", str(folder), "--resume", resume, *hosts, *options),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while (code := process.poll()) is None and (
        read_attempt_record(folder).number == before or not is_alive(folder)
    ):
        time.sleep(POLL_SECONDS)
    if code is not None:
        print(log.read_text(errors="replace"), end="", file=sys.stderr if code else sys.stdout)
        return code
    place = shlex.quote(str(folder))
    print(f"running    {plan.name}, process {process.pid}, detached")
    print(f"output     {log}")
    print(f"how it is  shardwright status {place}")
    print(f"follow it  shardwright logs {place} -f")
    print(f"end it     shardwright stop {place}")
    return 0
