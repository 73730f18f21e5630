"""Why a run ended: the failing rank's own error first, not the echo on the other ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shardwright.checkpoint.step_folders import published_steps
from shardwright.engines.engine_table import engine_of
from shardwright.layout.axes import ZERO_STAGES
from shardwright.monitor.rank_events import RankFailed, RankLost, first_failure, read_events
from shardwright.monitor.run_files import PROGRESS, write_status
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import CHECKPOINTING

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
    -15: "ended by signal 15: somebody, or a scheduler, told it to end",
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
)
"""Causes that end a training run; other codes refuse to start one."""
RANK_LOST_CAUSE = "gone without a word: killed, or its host lost power or network"


def port_was_taken(plan: Plan, run: Path) -> bool:
    """Whether another process took the port of `master_port: auto` between its choice and rank 0's
    start."""
    log = run / "launcher.log"
    if plan.launch.master_port is not None or not log.is_file():
        return False
    first = first_failure(read_events(log.read_text(errors="replace").splitlines()))
    return isinstance(first, RankFailed) and first.code == "SW6302" and first.rank == 0


def report_failure(plan: Plan, folder: Path, attempt: int, launcher_code: int) -> int:
    """Prints the cause, writes status.json, returns 1 for refused input and 3 for a run that did
    not finish."""
    run = folder / "run"
    log = (
        (run / "launcher.log").read_text(errors="replace")
        if (run / "launcher.log").exists()
        else ""
    )
    events = read_events(log.splitlines())
    first = first_failure(events)
    if first is None:
        return _report_without_cause(plan, folder, attempt, log, launcher_code)
    rank = first.rank
    where: dict[str, str | int | None] = {"host": first.host, "stage": first.stage}
    named = f"rank {rank} (stage {first.stage}, host {first.host}): "
    if isinstance(first, RankLost):
        cause = _signal_of(log) or RANK_LOST_CAUSE
        _print_error("SW6301", named + cause, _next_steps(plan, run, rank, str(first.host)))
        write_status(folder, "failed", attempt, rank=rank, **where, code="SW6301", cause=cause)
        return 3
    code, cause = first.code, first.cause
    if code == "SW6301":
        frames = _last_frames(first.traceback)
        notes = (frames, _memory_advice(plan, cause), _next_steps(plan, run, rank, str(first.host)))
        _print_error(code, named + cause, "\n".join(note for note in notes if note))
        others = sum(isinstance(e, RankFailed) for e in events) - 1
        if others:
            print(f"  ({others} other ranks failed after it: {run / 'errors'})", file=sys.stderr)
    else:
        _print_error(code, cause, first.help)
        where["help"] = first.help
    if code != "SW6006":  # else the folder, and its status, are another run's
        write_status(folder, "failed", attempt, rank=rank, **where, code=code, cause=cause)
    return 3 if code in UNFINISHED_RUN_CODES else 1


def _report_without_cause(
    plan: Plan, folder: Path, attempt: int, log: str, launcher_code: int
) -> int:
    """No rank could speak: a host that ssh does not reach, or a rank that ended before it was
    connected."""
    lost, ended = _SSH_FAILED.search(log), _SSH_ENDED.search(log)
    host = (lost[1] or lost[2]) if lost else ended[1] if ended else None
    if lost:
        cause = f"host {host}: no ssh to it, or the connection broke"
        help_text = f"Try `ssh {host} true`; `shardwright doctor` tries every host at once."
    elif signal := _signal_of(log) or _SIGNALS.get(launcher_code):
        when = "" if PROGRESS in log else " while the run came up"
        cause = f"a rank{f' on host {host}' if host else ''} was ended{when}: {signal}"
        help_text = "A host with too little memory shows like this: see `dmesg` there."
    else:
        on = f" on host {host}" if host else ""
        cause = (
            f"`{engine_of(plan).program}`{on} ended with code {launcher_code} and no rank said why"
        )
        help_text = "`shardwright doctor` compares the hosts' Python, packages and folders."
    lines = [
        line for line in log.splitlines() if host is None or line.startswith((f"{host}:", "pdsh@"))
    ]
    tail = "\n".join((lines or log.splitlines())[-15:])
    _print_error(
        "SW6301", cause, f"{help_text}\nthe end of {folder / 'run' / 'launcher.log'}:\n{tail}"
    )
    write_status(folder, "failed", attempt, rank=None, host=host, code="SW6301", cause=cause)
    return 3


def _signal_of(log: str) -> str | None:
    """DeepSpeed's launcher tells the signal that ended the first of its ranks, but not which one
    that was."""
    codes = [int(code) for code in _LAUNCHER_CODE.findall(log)]
    return _SIGNALS.get(codes[0], f"ended by signal {-codes[0]}") if codes else None


def _next_steps(plan: Plan, run: Path, rank: int, host: str) -> str:
    log = run / "launcher.log" if rank == 0 else run / "logs" / f"rank-{rank:05d}.log"
    there = "" if rank == 0 or log.exists() else f" (on host {host})"
    saved = published_steps(run.parent / plan.checkpoint.directory)
    resume = "continues from the newest checkpoint" if saved else "starts again"
    return f"its output: {log}{there}\nwhen that is mended: `shardwright run {run.parent}` {resume}"


def _memory_advice(plan: Plan, cause: str) -> str:
    """What was predicted, and the nearest layout that needs less; empty where the cause is
    another."""
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
        f"predicted: {memory.peak_bytes / 2**30:.1f} of {memory.capacity_bytes / 2**30:.1f} GiB on "
        "the fullest rank\n"
        f"needs less: compile with --set {change}; `shardwright plan` ranks the others"
    )


def _last_frames(traceback: str) -> str:
    """The innermost frames, as notes: enough to see whose code it was."""
    lines = [line for line in traceback.rstrip().splitlines() if line.strip()]
    return "\n".join(lines[-7:-1])


def _print_error(code: str, message: str, note: str) -> None:
    print(f"error[{code}]: {message}", file=sys.stderr)
    for line in note.splitlines():
        print(f"  {line}", file=sys.stderr)
