"""Measure gradient norms of single micro-batches in some steps, for the gradient noise scale.

A hook on each parameter reads the norm of a micro-batch's gradient before the engine accumulates
it, under ZeRO 0 to 3 and in a pipeline. It returns nothing, so the optimizer's input stays the same
bit for bit; other steps have no hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import distributed as dist

from shardwright.engines.trainer_protocol import NoiseScaleTrainer, StepResult, Trainer
from shardwright.monitor.gradient_noise_scale import (
    NoiseScale,
    StepNoise,
    noise_scale_of_recent_steps,
)
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import NoiseScaleSection
from shardwright.utils.json_values import JsonObject


def build_noise_scale_meter(
    plan: Plan, rank: int, trainer: Trainer, measured: list[tuple[int, StepNoise]]
) -> NoiseScaleMeter | None:
    """Build the meter; None where the recipe asks for none.

    measured: the steps of earlier attempts, on rank 0
    """
    section = None if plan.tracking is None else plan.tracking.noise_scale
    return (
        None
        if section is None
        else NoiseScaleMeter(plan, section, rank, cast(NoiseScaleTrainer, trainer), measured)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleMeasurement:
    """Hold one step's sums, its noise, and the noise scale of recent steps."""

    sums: GradientNormSums
    noise: StepNoise
    scale: NoiseScale

    def line(self) -> JsonObject:
        """Return the record of run/metrics.jsonl."""
        noise, scale = self.noise, self.scale
        own = {"gradient_square": noise.square, "row_variance": noise.variance, "rows": noise.rows}
        return {
            **own,
            "steps": scale.steps,
            "value": scale.value,
            "low": scale.low,
            "high": scale.high,
        }


class NoiseScaleMeter:
    """Measure on one rank; every rank makes the same calls."""

    def __init__(
        self,
        plan: Plan,
        section: NoiseScaleSection,
        rank: int,
        trainer: NoiseScaleTrainer,
        measured: list[tuple[int, StepNoise]],
    ) -> None:
        self._every, self._plan, self._at = section.every_steps, plan, plan.ranks[rank]
        self._parameters, self._device = tuple(trainer.counted()), trainer.device
        self._taken = measured_micro_batches(plan, section.rows, self._at.data)
        self._batch, self._rows = (
            plan.training.global_batch_size,
            measured_sequences(plan, section.rows),
        )
        self._measured = measured

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def measure(
        self, step: int, train: Callable[[], StepResult], micro_batches: Sequence[MicroBatch]
    ) -> tuple[StepResult, NoiseScaleMeasurement | None]:
        """Train a step and measure its noise; None where estimate_step_noise returns none.
        Collective.

        train: makes the step with these micro-batches
        """
        by_parameter = [_GradientNormHook(self._taken) for _ in self._parameters]
        hooks = [
            p.register_hook(take) for p, take in zip(self._parameters, by_parameter, strict=True)
        ]
        try:
            result = train()
        finally:
            for hook in hooks:
                hook.remove()
        sums = self._sums(by_parameter, [m.predicted for m in micro_batches])
        noise = (
            None
            if sums is None
            else estimate_step_noise(result.grad_norm, sums, self._batch, self._rows)
        )
        if sums is None or noise is None:
            return result, None
        self._measured.append((step, noise))
        return result, NoiseScaleMeasurement(
            sums=sums, noise=noise, scale=noise_scale_of_recent_steps(self._measured, self._batch)
        )

    def _sums(
        self, by_parameter: Sequence[_GradientNormHook], predicted: list[int]
    ) -> GradientNormSums | None:
        """Sum over all ranks; None where gradients do not match the micro-batches. Collective."""
        norms = [norm for each in by_parameter for norm in each.norms]
        # The engine averages over data ranks what the loss was scaled up by; a hook sees a gradient
        # before.
        own = (
            torch.stack(norms).double().square().sum().item()
            / self._plan.strategy.zero_world_size**2
            if norms
            else 0.0
        )
        unclear = any(each.seen not in (0, len(predicted)) for each in by_parameter)
        taken = predicted[: self._taken]
        speaks = self._at.tensor == 0 and self._at.pipeline == 0  # for its data rank
        counts = (sum(taken), sum(n * n for n in taken), sum(predicted)) if speaks else (0, 0, 0)
        sums = torch.tensor([own, *counts, unclear], dtype=torch.float64, device=self._device)
        dist.all_reduce(sums)
        *figures, unclear_ranks = sums.tolist()
        return None if unclear_ranks else GradientNormSums(*figures)


class GradientNormSums(NamedTuple):
    """Hold sums over some micro-batches of a step, with n labels each.

    squares: of |h|^2 / N^2, where h is the gradient of the sum of a micro-batch's losses
    labels, labels_squared: of n and n^2
    all_labels: N, the step's number of labels
    """

    squares: float
    labels: float
    labels_squared: float
    all_labels: float


def estimate_step_noise(
    grad_norm: float, sums: GradientNormSums, batch: int, rows: int
) -> StepNoise | None:
    """Estimate a step's squared gradient and the variance of a sequence's gradient.

    grad_norm: |H| / N, where H is the sum of the step's h

    With h = n G + e and E |e|^2 = n V, errors of micro-batches independent: E |h|^2 = n^2 |G|^2 + n
    V, and E |H|^2 = N^2 |G|^2 + N V. That gives |G|^2, and V / (labels of a sequence) is a
    sequence's variance. With equal n these are the estimators of arXiv 1812.06162, appendix A.1.
    None where a number is not finite, or there is nothing to compare.
    """
    whole, n = grad_norm**2, sums.all_labels
    between = n * sums.labels - sums.labels_squared
    if not (math.isfinite(whole) and math.isfinite(sums.squares)) or between <= 0:
        return None
    square = (whole * sums.labels / n - sums.squares) * n**2 / between
    return StepNoise(square=square, variance=batch * (whole - square), rows=rows)


def measured_micro_batches(plan: Plan, rows: int, data_rank: int) -> int:
    """Return how many of a data rank's first micro-batches hold the first `rows` sequences of a
    step.

    Micro-batch m of data rank d is the (m x data + d)-th of the step (parallel/micro_batches.py).
    """
    s = plan.strategy
    whole = math.ceil(rows / s.micro_batch_size)
    return min(s.gradient_accumulation_steps, max(0, math.ceil((whole - data_rank) / s.data)))


def measured_sequences(plan: Plan, rows: int) -> int:
    """Return the number of measured sequences: up to the end of a micro-batch."""
    s = plan.strategy
    return s.micro_batch_size * sum(measured_micro_batches(plan, rows, d) for d in range(s.data))


class _GradientNormHook:
    """Record the norms of one parameter's first gradients, which come in the order of
    micro-batches."""

    def __init__(self, most: int) -> None:
        self._most, self.seen = most, 0
        self.norms: list[torch.Tensor] = []

    def __call__(self, gradient: torch.Tensor) -> None:
        self.seen += 1
        if self.seen <= self._most:
            self.norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))
