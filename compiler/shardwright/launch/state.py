"""How a run is doing, read off the files that it leaves. No torch here."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.step_folders import step_of
from shardwright.data.dataset import noted_steps
from shardwright.ir.json_value import JsonValue
from shardwright.plan.plan import Plan
from shardwright.watch.journal import number, read_json

HEARTBEAT_LOST_SECONDS = 60.0
"""Rank 0 touches run/heartbeat every 5 s; clocks of two hosts may differ by some."""
RECENT_STEPS = 20
"""The pace is that of the last steps."""
ENDED = ("done", "preempted", "failed")
GONE = "it ended without a word: the machine went down, or its processes were killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """status: not started | starting | running | done | preempted | failed. eta_seconds: to the last step.

    step: the last one that this attempt goes on from or has trained; steps: of its training, which a later compile may
    have changed.
    stalled: what `run` said where no step came for long. rank, host, stage, cause: of a failure, or of a stall.
    help: what to do about it, where that is known.
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

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def holds_lock(folder: Path) -> bool:
    """Whether `run` or its launcher lives, on this host."""
    try:
        with (folder / "run" / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # never started by `run`
    return False


def is_alive(folder: Path) -> bool:
    """Whether the lock is held, or a rank 0 that was started otherwise was here a moment ago and has not ended."""
    if holds_lock(folder):
        return True
    if read_json(folder / "run" / "status.json").get("status") in ENDED:
        return False
    try:
        return time.time() - (folder / "run" / "heartbeat").stat().st_mtime < HEARTBEAT_LOST_SECONDS
    except OSError:
        return False


def read_state(plan: Plan, folder: Path) -> RunState:
    status = read_json(folder / "run" / "status.json")
    begun = read_json(folder / "run" / "attempt.json")
    attempt = begun.get("attempt")
    name, cause = str(status.get("status", "")), status.get("cause")
    if not name:
        name = "not started" if attempt is None else "starting"
    if name in ("starting", "running") and not is_alive(folder):
        name, cause = "failed", GONE
    step, loss, rate, pace = _last_steps(folder / "run" / "metrics.jsonl", begun)
    numbers = {key: status.get(key) for key in ("rank", "stage")}
    return RunState(
        status=name,
        attempt=None if attempt is None else int(str(attempt)),
        step=step,
        steps=(steps := int(str(begun.get("steps") or noted_steps(plan, folder)))),
        loss=loss,
        tokens_per_second=rate,
        eta_seconds=pace * (steps - step) if name == "running" and pace is not None else None,
        rank=None if numbers["rank"] is None else int(str(numbers["rank"])),
        host=None if status.get("host") is None else str(status["host"]),
        stage=None if numbers["stage"] is None else int(str(numbers["stage"])),
        cause=None if cause is None else str(cause),
        help=None if name != "failed" or status.get("help") is None else str(status["help"]),
        stalled=None if name != "running" or status.get("stalled") is None else str(status["stalled"]),
    )


def _last_steps(metrics: Path, begun: Mapping[str, JsonValue]) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, mean tokens per second, mean seconds of a step) of the last steps of the attempt `begun`
    and of those that it goes on from. What an earlier attempt trained beyond them does not count: an attempt that dies
    early leaves those lines where they are."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        lines = []
    resumed = step_of(Path(str(begun["resume"]))) if begun.get("resume") else 0
    rows: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half written
        if "attempt" not in begun or row.get("attempt") == begun["attempt"] or int(row["step"]) <= resumed:
            rows.insert(0, row)
        if len(rows) == RECENT_STEPS:
            break
    if not rows:
        return resumed, None, None, None
    seconds = sum(float(row["step_seconds"]) for row in rows)
    tokens = sum(int(row["tokens"]) for row in rows)
    return int(rows[-1]["step"]), number(rows[-1]["loss"]), tokens / seconds, seconds / len(rows)
