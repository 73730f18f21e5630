"""What a run left behind: its steps, how it ended, and what it measured against what was predicted."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from shardwright.plan.plan import Plan
from shardwright.runtime.journal import read_json

WARM_UP_STEPS = 3
"""The first steps allocate and compile: the median leaves them out where there are others."""
MOST_POINTS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_seconds: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """drawn: at most MOST_POINTS of the steps, evenly. peak_bytes: of the fullest rank, as run/summary.json
    tells it; None where it does not."""

    status: str
    cause: str
    steps: int
    drawn: tuple[Step, ...]
    median_step_seconds: float
    tokens_per_second_per_gpu: float
    first_loss: float
    last_loss: float
    peak_bytes: int | None


def read_run(folder: Path, plan: Plan) -> Measured | None:
    """None where no step was finished."""
    steps = _steps(folder / "run" / "metrics.jsonl")
    if not steps:
        return None
    status = read_json(folder / "run" / "status.json")
    settled = [s.step_seconds for s in steps[WARM_UP_STEPS:]] or [s.step_seconds for s in steps]
    median = statistics.median(settled)
    tokens = plan.training.global_batch_size * plan.training.sequence_length
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    return Measured(
        status=str(status.get("status", "unknown")),
        cause=str(status.get("cause") or ""),
        steps=steps[-1].step,
        drawn=tuple(s for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1),
        median_step_seconds=median,
        tokens_per_second_per_gpu=tokens / median / plan.strategy.world_size,
        first_loss=steps[0].loss,
        last_loss=steps[-1].loss,
        peak_bytes=_peak_bytes(folder / "run" / "summary.json"),
    )


def _steps(path: Path) -> list[Step]:
    """A half-written last line, or a line of another kind, is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found: dict[int, Step] = {}
    for line in lines:
        try:
            row = json.loads(line)
            step = Step(
                step=int(row["step"]),
                loss=float(row["loss"]),
                grad_norm=float(row["grad_norm"]),
                learning_rate=float(row["learning_rate"]),
                step_seconds=float(row["step_seconds"]),
                attempt=int(row["attempt"]),
            )
        except (ValueError, KeyError, TypeError):
            continue
        found[step.step] = step
    return [found[number] for number in sorted(found)]


def _peak_bytes(path: Path) -> int | None:
    measured = read_json(path).get("measured")
    peak = measured.get("peak_bytes") if isinstance(measured, dict) else None
    return int(peak) if isinstance(peak, int | float) else None
