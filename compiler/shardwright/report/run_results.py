"""Read a run's results: its steps, how it ended, and measured against predicted numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.run_attempts import earlier_attempts_text
from shardwright.monitor.attempt_records import (
    METRICS_FILE,
    AttemptSummary,
    attempt_summaries,
    cost_text,
    run_cost,
)
from shardwright.monitor.gradient_noise_scale import noise_scale_text, run_noise_scale
from shardwright.monitor.run_files import (
    EVALUATION_FILE,
    EvaluationLine,
    MetricsLine,
    number,
    read_json,
    read_status,
)
from shardwright.plan.plan import Plan
from shardwright.utils.json_lines import rows_by_step

WARM_UP_STEPS = 3
"""Leaves the first steps, which allocate and compile, out of the median where there are others."""
MOST_POINTS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Hold a step. margin, accuracy: of a preference objective. kl: of distillation. NaN under
    another objective."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_seconds: float
    tokens_per_second: float
    attempt: int
    margin: float
    accuracy: float
    kl: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StepMetrics:
        """Read a row of run/metrics.jsonl."""
        return cls(
            step=int(row["step"]),
            loss=number(row["loss"]),
            grad_norm=number(row["grad_norm"]),
            learning_rate=float(row["learning_rate"]),
            step_seconds=float(row["step_seconds"]),
            tokens_per_second=number(row["tokens_per_second"]),
            attempt=int(row["attempt"]),
            margin=number(row.get("margin")),
            accuracy=number(row.get("accuracy")),
            kl=number(row.get("kl")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Hold the held-out loss after a step. perplexity: of objectives over tokens. accuracy: of
    those over pairs. NaN under the other."""

    step: int
    loss: float
    perplexity: float
    accuracy: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Evaluation:
        """Read a row of run/evaluation.jsonl."""
        return cls(
            step=int(row["step"]),
            loss=number(row["loss"]),
            perplexity=number(row.get("perplexity")),
            accuracy=number(row.get("accuracy")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Hold a run's results.

    drawn: at most MOST_POINTS of the steps, evenly spaced
    peak_bytes: of the peak-memory rank (run/summary.json); None where it is missing
    noise: the gradient noise scale in words; "" where it was not measured
    earlier: how the attempts before this one ended; "" where there were none
    attempts: all, oldest first; cost: the seconds that restarts lost, in words
    """

    status: str
    cause: str
    steps: int
    drawn: tuple[StepMetrics, ...]
    median_step_seconds: float
    tokens_per_second_per_gpu: float
    first_loss: float
    last_loss: float
    peak_bytes: int | None
    evaluations: tuple[Evaluation, ...]
    noise: str
    earlier: str
    attempts: tuple[AttemptSummary, ...]
    cost: str


def read_run(folder: Path, plan: Plan) -> MeasuredRun | None:
    """Read a run's results; None where no step was finished."""
    steps = list(rows_by_step(folder / METRICS_FILE, StepMetrics.from_row, MetricsLine).values())
    if not steps:
        return None
    status, noise = read_status(folder), run_noise_scale(folder, plan.training.global_batch_size)
    settled = [s.step_seconds for s in steps[WARM_UP_STEPS:]] or [s.step_seconds for s in steps]
    median = statistics.median(settled)
    tokens = plan.training.tokens_per_step
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    measured = read_json(folder / "run" / "summary.json").get("measured")
    peak = measured.get("peak_bytes") if isinstance(measured, dict) else None
    return MeasuredRun(
        status=status.status or "unknown",
        cause=status.cause or "",
        steps=steps[-1].step,
        drawn=tuple(s for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1),
        median_step_seconds=median,
        tokens_per_second_per_gpu=tokens / median / plan.strategy.world_size,
        first_loss=steps[0].loss,
        last_loss=steps[-1].loss,
        peak_bytes=int(peak) if isinstance(peak, int | float) else None,
        evaluations=tuple(
            rows_by_step(folder / EVALUATION_FILE, Evaluation.from_row, EvaluationLine).values()
        ),
        noise="" if noise is None else noise_scale_text(noise),
        earlier=earlier_attempts_text(folder),
        attempts=tuple(attempt_summaries(folder)),
        cost=cost_text(run_cost(folder)),
    )
