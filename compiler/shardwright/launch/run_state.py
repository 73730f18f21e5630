"""Read the state of a run from the files that it writes. Imports no torch."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required

from shardwright.checkpoint.checkpoint_storage import published_steps, step_of
from shardwright.checkpoint.run_attempts import earlier_attempts_text
from shardwright.data.dataset import recorded_step_count
from shardwright.engines.engine_table import engine_of
from shardwright.layout.axes import ZERO_STAGES
from shardwright.monitor.gradient_noise_scale import NoiseScale, run_noise_scale
from shardwright.monitor.rank_events import (
    RankFailed,
    RankLost,
    RunStalled,
    first_failure,
    read_events,
)
from shardwright.monitor.run_files import (
    PROGRESS,
    AttemptRecord,
    MetricsLine,
    SaveStatistics,
    number,
    read_attempt_record,
    read_save_statistics,
    read_status,
    write_status,
)
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import CHECKPOINTING
from shardwright.utils.json_lines import Count, Figure, PositiveSeconds, read_json_lines
from shardwright.utils.json_values import JsonValue, copy_shared_fields
from shardwright.utils.run_lease import is_locked_by_run

HEARTBEAT_LOST_SECONDS = 60.0
"""Rank 0 touches run/heartbeat every 5 s; clocks of two hosts may differ by some."""
RECENT_STEPS = 20
"""The pace is that of the last steps."""
FINAL_STATUSES = ("done", "preempted", "failed")
LOST_RUN_CAUSE = (
    "the run stopped without an error message: the machine went down, or the processes were killed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """status: not started | starting | running | done | preempted | failed. eta_seconds: to the
    last step.

    step: the last one that this attempt goes on from or has trained; steps: of its training, which
    a later compile may have changed. stalled: what `run` said where no step came for long. rank,
    host, stage, cause: of a failure, or of a stall. help: what to do about it, where that is known.
    saves: how long training waited for checkpoints. noise_scale: of the gradient, where steps were
    measured. earlier: how the attempts before this one ended.
    """

    status: str
    attempt: int | None
    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    rank: int | None
    host: str | None
    stage: int | None
    cause: str | None
    help: str | None
    stalled: str | None
    saves: SaveStatistics | None = None
    noise_scale: NoiseScale | None = None
    earlier: str = ""

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES


def is_alive(folder: Path) -> bool:
    """Return whether the run's lock is held, or a rank 0 without a lock has a recent heartbeat and
    no final status."""
    if is_locked_by_run(folder):
        return True
    if read_status(folder).status in FINAL_STATUSES:
        return False
    try:
        return time.time() - (folder / "run" / "heartbeat").stat().st_mtime < HEARTBEAT_LOST_SECONDS
    except OSError:
        return False


def read_state(plan: Plan, folder: Path) -> RunState:
    status, begun = read_status(folder), read_attempt_record(folder)
    name, cause = status.status, status.cause
    if not name:
        name = "not started" if begun.number is None else "starting"
    if name in ("starting", "running") and not is_alive(folder):
        name, cause = "failed", LOST_RUN_CAUSE
    step, loss, rate, pace = _last_steps(folder / "run" / "metrics.jsonl", begun)
    steps = begun.steps or recorded_step_count(plan, folder)
    return copy_shared_fields(
        RunState,
        status,
        status=name,
        attempt=begun.number,
        step=step,
        steps=steps,
        loss=loss,
        tokens_per_second=rate,
        eta_seconds=pace * (steps - step) if name == "running" and pace is not None else None,
        cause=cause,
        help=status.help if name == "failed" else None,
        stalled=status.stalled if name == "running" else None,
        saves=read_save_statistics(folder),
        noise_scale=run_noise_scale(folder, plan.training.global_batch_size),
        earlier=earlier_attempts_text(folder),
    )


class RecentLine(MetricsLine):
    """A line of run/metrics.jsonl that tells a run's pace."""

    loss: Required[Figure | None]  # type: ignore[misc]
    tokens: Required[Count]  # type: ignore[misc]
    step_seconds: Required[PositiveSeconds]  # type: ignore[misc]


def _last_steps(
    metrics: Path, begun: AttemptRecord
) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, mean tokens per second, mean seconds of a step) of the last steps of
    the attempt `begun` and of those that it goes on from. What an earlier attempt trained beyond
    them does not count: an attempt that dies early leaves those lines where they are."""
    resumed = begun.memory_step or (step_of(Path(begun.resume)) if begun.resume else 0)
    rows: list[dict[str, Any]] = []
    for row in read_json_lines(metrics, RecentLine, newest_first=True):
        if begun.number is None or row.get("attempt") == begun.number or row["step"] <= resumed:
            rows.insert(0, row)
        if len(rows) == RECENT_STEPS:
            break
    if not rows:
        return resumed, None, None, None
    seconds = sum(row["step_seconds"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return rows[-1]["step"], number(rows[-1]["loss"]), tokens / seconds, seconds / len(rows)


# Why a run ended: the failing rank's own error first, not the echo on the other ranks.


_LAUNCHER_CODE = re.compile(r"exits with return code = (-\d+)")
# pdsh's own word, and that of DeepSpeed's launcher, which tries the first host by itself.
_SSH_FAILED = re.compile(
    r"^pdsh@\S+: (\S+): ssh exited with exit code 255|but host=(\S+) was not reachable via ssh",
    re.MULTILINE,
)
_SSH_ENDED = re.compile(r"^pdsh@\S+: (\S+): ssh exited with exit code (\d+)", re.MULTILINE)
_SIGNALS = {
    -9: "killed (signal 9): most often the host ran out of memory; see `dmesg` there",
    -6: "aborted (signal 6)",
    -7: "bus error (signal 7): most often /dev/shm is full",
    -11: "segmentation fault (signal 11)",
    -15: "terminated (signal 15) by a user or a scheduler",
}
UNFINISHED_RUN_CODES = (
    "SW6301",
    "SW6205",
    "SW6208",
    "SW6216",
    "SW6210",
    "SW6011",
    "SW6311",
    "SW6315",
    "SW6317",
    "SW6323",
)
"""Causes that end a training run; other codes refuse to start one."""
RANK_LOST_CAUSE = (
    "lost without an error message: the rank was killed, or its host lost power or network"
)


def port_was_taken(plan: Plan, run: Path) -> bool:
    """Return whether another process took the port of `master_port: auto` before rank 0 started."""
    log = run / "launcher.log"
    if plan.launch.master_port is not None or not log.is_file():
        return False
    first = first_failure(read_events(log.read_text(errors="replace").splitlines()))
    return isinstance(first, RankFailed) and first.code == "SW6302" and first.rank == 0


def report_failure(
    plan: Plan, folder: Path, attempt: int, launcher_code: int, unlogged: str = ""
) -> int:
    """Prints the cause, writes status.json, returns 1 for refused input and 3 for a run that did
    not finish. unlogged: the end of the launcher's output, where its log could not be written."""
    run = folder / "run"
    log = (
        (run / "launcher.log").read_text(errors="replace")
        if (run / "launcher.log").exists()
        else ""
    )
    log += unlogged
    events = read_events(log.splitlines())
    first = first_failure(events)
    if first is None:
        # No rank reported a failure: ssh does not reach a host, or a rank died before it connected.
        lost, ended = _SSH_FAILED.search(log), _SSH_ENDED.search(log)
        host = (lost[1] or lost[2]) if lost else ended[1] if ended else None
        if lost:
            cause = f"host {host}: ssh cannot connect, or the connection broke"
            help_text = f"Try `ssh {host} true`; `shardwright doctor` checks every host."
        elif signal := _signal_of(log) or _SIGNALS.get(launcher_code):
            when = "" if PROGRESS in log else " while the run started"
            cause = f"a rank{f' on host {host}' if host else ''} was ended{when}: {signal}"
            help_text = "Check `dmesg` on the host: too little memory is the most common cause."
        else:
            on = f" on host {host}" if host else ""
            cause = (
                f"`{engine_of(plan).program}`{on} ended with code {launcher_code}, and no rank "
                "reported an error"
            )
            help_text = "`shardwright doctor` compares the hosts' Python, packages and folders."
        lines = [
            line
            for line in log.splitlines()
            if host is None or line.startswith((f"{host}:", "pdsh@"))
        ]
        tail = "\n".join((lines or log.splitlines())[-15:])
        _print_error(
            "SW6301", cause, f"{help_text}\nthe end of {folder / 'run' / 'launcher.log'}:\n{tail}"
        )
        _write_failure(folder, attempt, rank=None, host=host, code="SW6301", cause=cause)
        return 3
    rank = first.rank
    where: dict[str, str | int | None] = {"host": first.host, "stage": first.stage}
    named = f"rank {rank} (stage {first.stage}, host {first.host}): "
    if isinstance(first, RankLost):
        cause = _signal_of(log) or RANK_LOST_CAUSE
        _print_error("SW6301", named + cause, _next_steps(plan, run, rank, str(first.host)))
        _write_failure(folder, attempt, rank=rank, **where, code="SW6301", cause=cause)
        return 3
    code, cause = first.code, first.cause
    if code == "SW6301":
        lines = [line for line in first.traceback.rstrip().splitlines() if line.strip()]
        frames = "\n".join(lines[-7:-1])  # the innermost ones: enough to see whose code it was
        notes = (frames, _memory_advice(plan, cause), _next_steps(plan, run, rank, str(first.host)))
        _print_error(code, named + cause, "\n".join(note for note in notes if note))
        others = sum(isinstance(e, RankFailed) for e in events) - 1
        if others:
            print(f"  ({others} other ranks failed after it: {run / 'errors'})", file=sys.stderr)
    else:
        _print_error(code, cause, first.help)
        where["help"] = first.help
    if code != "SW6006":  # else the folder, and its status, are another run's
        _write_failure(folder, attempt, rank=rank, **where, code=code, cause=cause)
    return 3 if code in UNFINISHED_RUN_CODES else 1


def report_stall(folder: Path, attempt: int, stall: RunStalled) -> int:
    """Print why a supervised run was ended in a stall, write status.json, return 3."""
    suspect = read_status(folder)
    _print_error("SW6303", stall.text, "The supervisor ended this attempt.")
    _write_failure(
        folder,
        attempt,
        rank=stall.ranks[0] if stall.ranks else None,
        host=suspect.host if stall.ranks else None,
        stage=suspect.stage if stall.ranks else None,
        code="SW6303",
        cause=stall.text,
    )
    return 3


def _write_failure(folder: Path, attempt: int, **more: JsonValue) -> None:
    """Write status.json. Where the disk is full to the last block, the heartbeat goes, so that
    nobody takes the run for a living one."""
    try:
        write_status(folder, "failed", attempt, **more)
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / "run" / "heartbeat").unlink(missing_ok=True)
        print(f"  {error.filename} cannot be written: {error.strerror}", file=sys.stderr)


def ended_by_signal(folder: Path, launcher_code: int | None) -> int | None:
    """Return the signal that ended the launcher, or the first rank of which DeepSpeed's launcher
    tells it; None where none did."""
    if launcher_code is not None and launcher_code < 0:
        return -launcher_code
    try:
        log = (folder / "run" / "launcher.log").read_text(errors="replace")
    except OSError:
        return None
    return _first_signal(log)


def _first_signal(log: str) -> int | None:
    """Return the signal that ended the first rank of which DeepSpeed's launcher tells it; it does
    not tell which rank that was."""
    first = _LAUNCHER_CODE.search(log)
    return -int(first[1]) if first else None


def _signal_of(log: str) -> str | None:
    """Return that signal in words."""
    number = _first_signal(log)
    return None if number is None else _SIGNALS.get(-number, f"ended by signal {number}")


def _next_steps(plan: Plan, run: Path, rank: int, host: str) -> str:
    log = run / "launcher.log" if rank == 0 else run / "logs" / f"rank-{rank:05d}.log"
    there = "" if rank == 0 or log.exists() else f" (on host {host})"
    saved = published_steps(run.parent / plan.checkpoint.directory)
    resume = "continues from the newest checkpoint" if saved else "starts again"
    return f"its output: {log}{there}\nafter fixing it: `shardwright run {run.parent}` {resume}"


def _memory_advice(plan: Plan, cause: str) -> str:
    """Return the predicted memory and the nearest layout that needs less; empty for any other
    cause."""
    if "out of memory" not in cause.lower() and "OutOfMemory" not in cause:
        return ""
    s, memory = plan.strategy, plan.predicted.memory
    if s.activation_checkpointing != CHECKPOINTING[-1]:
        change = f"parallelism.activation_checkpointing={CHECKPOINTING[-1]}"
    elif s.micro_batch_size > 1:
        change = f"parallelism.micro_batch_size={s.micro_batch_size // 2}"
    elif s.pipeline == 1 and s.zero_stage < ZERO_STAGES[-1]:
        change = f"parallelism.zero_stage={s.zero_stage + 1}"
    else:
        change = "objective=memory"
    return (
        f"predicted: {memory.peak_bytes / 2**30:.1f} of "
        f"{memory.capacity_bytes / 2**30:.1f} GiB on the peak-memory rank\nneeds less: "
        f"compile with --set {change}; `shardwright plan` ranks the others"
    )


def _print_error(code: str, message: str, note: str) -> None:
    print(f"error[{code}]: {message}", file=sys.stderr)
    for line in note.splitlines():
        print(f"  {line}", file=sys.stderr)
