"""How a run is doing, read off the files that it leaves. No torch here."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.step_folders import step_of
from shardwright.data.dataset import recorded_step_count
from shardwright.monitor.gradient_noise_scale import NoiseScale, run_noise_scale
from shardwright.monitor.run_files import (
    AttemptRecord,
    SaveStatistics,
    number,
    read_attempt_record,
    read_save_statistics,
    read_status,
)
from shardwright.plan.plan import Plan
from shardwright.utils.json_records import copy_shared_fields
from shardwright.utils.run_lease import is_locked_by_run

HEARTBEAT_LOST_SECONDS = 60.0
"""Rank 0 touches run/heartbeat every 5 s; clocks of two hosts may differ by some."""
RECENT_STEPS = 20
"""The pace is that of the last steps."""
FINAL_STATUSES = ("done", "preempted", "failed")
LOST_RUN_CAUSE = "it ended without a word: the machine went down, or its processes were killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """status: not started | starting | running | done | preempted | failed. eta_seconds: to the
    last step.

    step: the last one that this attempt goes on from or has trained; steps: of its training, which
    a later compile may have changed. stalled: what `run` said where no step came for long. rank,
    host, stage, cause: of a failure, or of a stall. help: what to do about it, where that is known.
    saves: how long training waited for checkpoints. noise_scale: of the gradient, where steps were
    measured.
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

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES


def is_alive(folder: Path) -> bool:
    """Whether the lock is held, or a rank 0 that was started otherwise was here a moment ago and
    has not ended."""
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
    )


def _last_steps(
    metrics: Path, begun: AttemptRecord
) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, mean tokens per second, mean seconds of a step) of the last steps of
    the attempt `begun` and of those that it goes on from. What an earlier attempt trained beyond
    them does not count: an attempt that dies early leaves those lines where they are."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        lines = []
    resumed = step_of(Path(begun.resume)) if begun.resume else 0
    rows: list[dict[str, Any]] = []
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half written
        if (
            begun.number is None
            or row.get("attempt") == begun.number
            or int(row["step"]) <= resumed
        ):
            rows.insert(0, row)
        if len(rows) == RECENT_STEPS:
            break
    if not rows:
        return resumed, None, None, None
    seconds = sum(float(row["step_seconds"]) for row in rows)
    tokens = sum(int(row["tokens"]) for row in rows)
    return int(rows[-1]["step"]), number(rows[-1]["loss"]), tokens / seconds, seconds / len(rows)
