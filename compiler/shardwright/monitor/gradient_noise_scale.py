"""The gradient noise scale of a run, from what run/metrics.jsonl has of its measured steps. No
torch here.

B_simple = tr(Sigma) / |G|^2 (arXiv 1812.06162, section 2.2): the variance of one row's gradient
over the squared length of the mean gradient, in rows. Of a batch of B rows the gradient's noise is
B_simple / B of its signal, both squared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from shardwright.monitor.attempt_records import METRICS_FILE
from shardwright.utils.json_lines import Count, Figure, StepLine, rows_by_step
from shardwright.utils.json_values import JsonObject
from shardwright.utils.number_format import format_number

KEY = "noise_scale"
"""Names the key in a line of run/metrics.jsonl."""
WINDOW = 40
"""Measured steps that are averaged at most, the newest: the noise scale moves as the loss falls. Of
32 rows each, five such averages on a tiny model lay within 40 and 66, where every row's gradient
gave 51 to 63."""
MIN_STEPS_FOR_INTERVAL = 4
"""Measured steps below which there is no interval."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """Holds one step's estimates, which are unbiased, so that either may be negative.

    square: |G|^2, the squared length of the mean gradient. variance: tr(Sigma) of a sequence of
    mean length. rows: sequences whose gradients were measured.
    """

    square: float
    variance: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Holds a noise scale in sequences of the global batch.

    value: None where the mean square is not positive. high: None where the mean gradient does not
    differ from zero, so that any larger noise scale is possible. Both ends are None below
    MIN_STEPS_FOR_INTERVAL steps. steps: averaged ones. rows: sequences measured in each step.
    batch: sequences of the global batch. step: the last measured one.
    """

    value: float | None
    low: float | None
    high: float | None
    steps: int
    rows: int
    batch: int
    step: int

    def curves(self) -> dict[str, float]:
        """Return the values that trackers plot, by name."""
        named = {KEY: self.value, f"{KEY}_low": self.low, f"{KEY}_high": self.high}
        return {name: value for name, value in named.items() if value is not None}


def noise_scale_of_recent_steps(steps: Sequence[tuple[int, StepNoise]], batch: int) -> NoiseScale:
    """steps: number and figures of each measured one, at least one, in order. batch: rows of the
    global batch.

    Over the newer half of the training so far, at most WINDOW steps of it: the first gradients are
    long, and would speak for all the others.
    """
    last, _ = steps[-1]
    return ratio_of_means(
        [(step, noise) for step, noise in steps[-WINDOW:] if 2 * step > last], batch
    )


def ratio_of_means(steps: Sequence[tuple[int, StepNoise]], batch: int) -> NoiseScale:
    """Return the noise scale over all of these steps, as a ratio of means: a mean of ratios has a
    bias.

    The interval is Fieller's (J. R. Stat. Soc. B 16, 1954), with Student's t, from the scatter over
    the steps.
    """
    squares, variances = [n.square for _, n in steps], [n.variance for _, n in steps]
    square, variance = statistics.fmean(squares), statistics.fmean(variances)
    low, high = (
        (None, None) if len(steps) < MIN_STEPS_FOR_INTERVAL else _interval(squares, variances)
    )
    last, newest = steps[-1]
    return NoiseScale(
        value=max(0.0, variance) / square if square > 0 else None,
        low=low,
        high=high,
        steps=len(steps),
        rows=newest.rows,
        batch=batch,
        step=last,
    )


def _interval(squares: Sequence[float], variances: Sequence[float]) -> tuple[float, float | None]:
    """The ratios r >= 0 of the means with (variance - r square)^2 <= t^2 Var(variance - r
    square)."""
    count, square, variance = len(squares), statistics.fmean(squares), statistics.fmean(variances)
    t2_of_means = _student(count - 1) ** 2 / count
    a = square**2 - t2_of_means * statistics.variance(squares)
    b = square * variance - t2_of_means * statistics.covariance(squares, variances)
    c = variance**2 - t2_of_means * statistics.variance(variances)
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    # The mean square may be none: every ratio from here on, or from 0 on.
    return ((b - root) / a if a < 0 < c else 0.0), None


def _student(freedom: int) -> float:
    """Return the two-sided quantile of Student's t, by Fisher and Cornish's expansion (Abramowitz
    and Stegun, 26.7.5). It is 1 % low at 3 degrees of freedom, and closer beyond."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


class _Noise(TypedDict):
    gradient_square: Figure
    row_variance: Figure
    rows: Count


class NoiseLine(StepLine):
    """A line of run/metrics.jsonl of a measured step."""

    noise_scale: _Noise


def read_step_noise(folder: Path) -> list[tuple[int, StepNoise]]:
    """(step, its figures) of each measured step in run/metrics.jsonl, the newest line of each, in
    order; [] where there are none. folder: the compiled one. A line that is cut short is left
    out."""

    def step_noise(line: JsonObject) -> StepNoise:
        of: Any = line[KEY]
        return StepNoise(square=of["gradient_square"], variance=of["row_variance"], rows=of["rows"])

    rows = rows_by_step(folder / METRICS_FILE, step_noise, NoiseLine, containing=f'"{KEY}"')
    return list(rows.items())


def run_noise_scale(folder: Path, batch: int) -> NoiseScale | None:
    """Return a run's noise scale; None where no step was measured. batch: sequences of the global
    batch."""
    steps = read_step_noise(folder)
    return noise_scale_of_recent_steps(steps, batch) if steps else None


def noise_scale_text(scale: NoiseScale) -> str:
    """A sentence, with no more in it than was measured: McCandlish et al. name B_simple a proxy of
    the largest batch that is worth it, and arXiv 2505.23971 finds it orders of magnitude below
    that."""
    ratio_of_means = f"{scale.steps} step{'' if scale.steps == 1 else 's'} of {scale.rows} rows"
    if scale.low is None:
        return f"too few measured steps for a noise scale yet: {ratio_of_means}"
    if scale.value is None:
        return (
            f"no noise scale: over {ratio_of_means} the mean gradient cannot be told from the noise"
        )
    upper = "more" if scale.high is None else format_number(scale.high)
    about = (
        f"noise scale {format_number(scale.value)} rows, 95 % interval "
        f"{format_number(scale.low)} to "
        f"{upper}, over {ratio_of_means}"
    )
    return (
        f"your batch is {_batch_fraction_text(scale)} of the noise scale: {about}; a proxy, not "
        "the critical "
        "batch size"
    )


def _batch_fraction_text(scale: NoiseScale) -> str:
    most = f"{format_number(scale.batch / scale.low, 2)}" if scale.low else "any number"
    if not scale.high:
        return f"at most {most}" if scale.low else most
    return f"{format_number(scale.batch / scale.high, 2)} to {most}"
