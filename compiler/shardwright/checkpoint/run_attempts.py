"""Keep what earlier attempts of a run left: their files in run/attempts/NUMBER/, and a line for the
start and the end of each in run/attempts.jsonl, which is only ever appended to.

The current attempt's files are in run/ itself. The next attempt moves them
(compiler/decisions/043-attempts-keep-their-evidence.md).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.monitor.attempt_records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    discarded_seconds,
    read_attempts,
    read_step_times,
)
from shardwright.monitor.run_files import (
    MetricsLine,
    read_attempt_record,
    read_json,
    read_status,
    refresh_attempts,
    write_attempt_record,
)
from shardwright.plan.plan import Plan
from shardwright.utils.json_lines import append_line, read_json_lines
from shardwright.utils.json_values import JsonObject

ATTEMPTS_FOLDER = "run/attempts"
KEPT_ATTEMPTS = 10
"""Folders that are kept: the first attempt's, whose error is often the cause of the others, and the
newest."""
FILES = ("status.json", "launcher.log", "errors", "ranks")
RANK_LOGS = "rank-*.log"


def last_attempt_number(folder: Path) -> int:
    """Return the number of the last attempt; 0 where none began."""
    known = [int(each["attempt"]) for each in read_attempts(folder)]
    return max([read_attempt_record(folder).number or 0, *known])


def record_start(
    plan: Plan, folder: Path, number: int, resume: str | None, step: int, hosts: Sequence[str]
) -> None:
    """hosts: () where they are not known here. Raises OSError."""
    line: JsonObject = {
        "event": "start",
        "attempt": number,
        "time": time.time(),
        "launcher": plan.launch.launcher,
        "hosts": list(hosts) or None,
        "nodes": plan.nodes,
        "layout": layout_text(plan),
        "world_size": plan.strategy.world_size,
        "resume": resume,
        "step": step,
        "discarded_seconds": round(discarded_seconds(folder, step), 3),
    }
    append_line(folder / ATTEMPTS_FILE, line)


def record_memory_resume(folder: Path, number: int, step: int) -> None:
    """Write down that the ranks went on from a copy in memory, newer than the checkpoint that the
    attempt began with. Raises OSError."""
    line: JsonObject = {
        "event": "resume",
        "attempt": number,
        "step": step,
        "memory": True,
        "discarded_seconds": round(discarded_seconds(folder, step), 3),
    }
    append_line(folder / ATTEMPTS_FILE, line)
    write_attempt_record(folder, replace(read_attempt_record(folder), memory_step=step))


DEGREES = ("tensor", "pipeline", "data", "zero_stage", "expert", "context", "virtual_stages")


def layout_text(plan: Plan) -> str:
    """Return the layout's degrees, as `plan` prints them."""
    words = plan.strategy.describe().split()
    return " ".join(word for word in words if word.partition("=")[0] in DEGREES)


def record_end(
    plan: Plan, folder: Path, exit_code: int | None, signal: int | None, *, seen: bool = True
) -> None:
    """Add the line of the current attempt's end, as its files tell it. seen: this process saw it
    end. Raises OSError."""
    run, status = folder / "run", read_status(folder)
    number = last_attempt_number(folder)
    own = status.status in ("done", "preempted", "failed")
    failed = status.status == "failed"
    saved = published_steps(folder / plan.checkpoint.directory)
    times = read_step_times(folder).get(number)
    line: JsonObject = {
        "event": "end",
        "attempt": number,
        "time": time.time() if seen else _last_written(run),
        "outcome": status.status if own else "lost",
        "exit_code": exit_code,
        "signal": signal,
        "stop_requested": (run / "stop").exists(),
        "code": status.code if failed else None,
        "cause": status.cause if failed else None,
        "rank": status.rank if failed else None,
        "host": status.host if failed else None,
        "hosts": _hosts(run),
        "step": _last_step(folder, number),
        "checkpoint": saved[-1][1].name if saved else None,
        "first_step_time": None if times is None else times.began,
        "last_step_time": None if times is None else times.ended,
    }
    append_line(folder / ATTEMPTS_FILE, line)
    refresh_attempts(folder)


def _last_written(run: Path) -> float | None:
    times = []
    for name in ("heartbeat", "metrics.jsonl", "status.json", "attempt.json"):
        with contextlib.suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(times, default=None)


def _hosts(run: Path) -> list[str] | None:
    """Return the hosts that this folder's ranks have named."""
    records = (read_json(path) for path in sorted((run / "ranks").glob("rank-*.json")))
    named = dict.fromkeys(host for each in records if isinstance(host := each.get("host"), str))
    return list(named) or None


def _last_step(folder: Path, number: int) -> int | None:
    """Return the last step that this attempt trained, else the one that it went on from."""
    for row in read_json_lines(folder / METRICS_FILE, MetricsLine, newest_first=True):
        if row.get("attempt") == number:
            return int(row["step"])
    return read_attempt_record(folder).step


def keep_attempt(plan: Plan, folder: Path, *, with_logs: bool) -> int:
    """Move what the last attempt left out of the next one's way; return the next one's number.

    with_logs: the launcher's and the ranks' logs too, which the next attempt does not write yet

    Each file is renamed, so that one that is killed in the middle is moved by the next. Raises
    OSError.
    """
    run, number = folder / "run", last_attempt_number(folder)
    ended = {each["attempt"] for each in read_attempts(folder) if each["end"] is not None}
    if number and number not in ended:
        record_end(plan, folder, None, None, seen=False)
    for path in _evidence(run, with_logs=with_logs):
        move_to_attempt(folder, number, path)
    _remove_oldest(folder)
    return number + 1


def _evidence(run: Path, *, with_logs: bool) -> Iterator[Path]:
    for name in FILES:
        if with_logs or name != "launcher.log":
            yield run / name
    if with_logs:
        yield from sorted((run / "logs").glob(RANK_LOGS))


def move_to_attempt(folder: Path, number: int, path: Path) -> None:
    """Rename a file or folder of run/ into the attempt's folder; nothing there is replaced. Raises
    OSError."""
    if not path.exists() and not path.is_symlink():
        return
    to = folder / ATTEMPTS_FOLDER / str(number) / path.relative_to(folder / "run")
    to.parent.mkdir(parents=True, exist_ok=True)
    taken = 0
    while to.exists():
        taken += 1
        to = to.with_name(f"{path.name}.{taken}")
    path.rename(to)


def _remove_oldest(folder: Path) -> None:
    """Remove the attempts' folders between the first and the newest, and name them."""
    numbered = sorted(
        int(path.name)
        for path in (folder / ATTEMPTS_FOLDER).glob("*")
        if path.name.isdecimal() and path.is_dir()
    )
    for number in numbered[1 : max(1, len(numbered) - KEPT_ATTEMPTS + 1)]:
        shutil.rmtree(folder / ATTEMPTS_FOLDER / str(number), ignore_errors=True)
        print(
            f"removed {ATTEMPTS_FOLDER}/{number}: the first attempt and the {KEPT_ATTEMPTS - 1} "
            f"newest are kept, and {ATTEMPTS_FILE} has a line of each",
            file=sys.stderr,
            flush=True,
        )


def earlier_attempts_text(folder: Path) -> str:
    """Return how the attempts before the current one ended, in one line; "" where there are
    none."""
    current = last_attempt_number(folder)
    earlier = [each for each in read_attempts(folder) if each["attempt"] < current]
    if not earlier:
        return ""
    number, end = earlier[-1]["attempt"], earlier[-1]["end"] or {}
    outcome = end.get("outcome") or "without a record of the end"
    step = "" if end.get("step") is None else f" at step {end['step']}"
    where = "" if end.get("rank") is None else f", rank {end['rank']}"
    code = f" ({end['code']}{where})" if end.get("code") else ""
    cause = " ".join(str(end.get("cause") or "").split())[:200]
    kept = folder / ATTEMPTS_FOLDER / str(number)
    place = f"; {ATTEMPTS_FOLDER}/{number}" if kept.is_dir() else ""
    return (
        f"{len(earlier)} earlier; attempt {number} {outcome}{step}{code}"
        f"{f': {cause}' if cause else ''}{place}"
    )
