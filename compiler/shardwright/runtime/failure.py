"""Why a run ended: the failing rank's own error first, not the echo on the other ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shardwright.plan.plan import Plan
from shardwright.runtime.journal import is_echo, read_json, write_status

_LAST = re.compile(r"--local_rank=(\d+).*exits with return code = (-?\d+)")
_SIGNALS = {
    -9: "killed (signal 9): most often the host ran out of memory; see `dmesg`",
    -6: "aborted (signal 6)",
    -7: "bus error (signal 7): most often /dev/shm is full",
    -11: "segmentation fault (signal 11)",
}


def report_failure(plan: Plan, folder: Path, attempt: int, launcher_code: int) -> int:
    """Prints the cause, writes status.json, returns 1 for refused input and 3 for a run that did not finish."""
    run = folder / "run"
    records = [read_json(p) for p in (run / "errors").glob("rank-*.json")] if (run / "errors").is_dir() else []
    records = sorted((r for r in records if r.get("attempt") == attempt), key=lambda r: int(str(r["time_ns"])))
    log = (run / "launcher.log").read_text(errors="replace") if (run / "launcher.log").exists() else ""
    killed = [(int(rank), int(code)) for rank, code in _LAST.findall(log) if int(code) < 0]
    if killed and (not records or is_echo(str(records[0]["cause"]))):
        rank, exit_code = killed[0]
        cause = _SIGNALS.get(exit_code, f"ended by signal {-exit_code}")
        _print_error("SW6301", f"rank {rank}: {cause}", f"its output: {_log_of(run, rank)}")
        write_status(folder, "failed", attempt, rank=rank, stage=plan.ranks[rank].pipeline, cause=cause)
        return 3
    if not records:
        tail = "\n".join(log.splitlines()[-15:])
        cause = f"the deepspeed launcher ended with code {launcher_code} and no rank said why"
        _print_error("SW6301", cause, f"the end of {run / 'launcher.log'}:\n{tail}")
        write_status(folder, "failed", attempt, rank=None, cause=cause)
        return 3
    first = records[0]
    code, cause, rank = str(first["code"]), str(first["cause"]), int(str(first["rank"]))
    if code == "SW6301":
        where = f"rank {rank} (stage {first['stage']}, host {first['host']}): "
        _print_error(code, where + cause, _last_frames(str(first["traceback"])) + f"\nits output: {_log_of(run, rank)}")
        if len(records) > 1:
            print(f"  ({len(records) - 1} other ranks failed after it: {run / 'errors'})", file=sys.stderr)
    else:
        _print_error(code, cause, str(first["help"]))
    write_status(folder, "failed", attempt, rank=rank, host=first["host"], stage=first["stage"], code=code, cause=cause)
    return 3 if code == "SW6301" else 1


def _log_of(run: Path, rank: int) -> Path:
    return run / "launcher.log" if rank == 0 else run / "logs" / f"rank-{rank:05d}.log"


def _last_frames(traceback: str) -> str:
    """The innermost frames, as notes: enough to see whose code it was."""
    lines = [line for line in traceback.rstrip().splitlines() if line.strip()]
    return "\n".join(lines[-7:-1])


def _print_error(code: str, message: str, note: str) -> None:
    print(f"error[{code}]: {message}", file=sys.stderr)
    for line in note.splitlines():
        print(f"  {line}", file=sys.stderr)
