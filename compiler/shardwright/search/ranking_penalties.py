"""What a ranking weighs: a layout's time over the chance that it fits, and a price for each of its
moving parts."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.prediction_errors import error_benchmark
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.memoize import MAX_RESULTS

SAFE_FIT_PROBABILITY = 0.95
"""The chance at which memory has no price: `memory_headroom` is what predictions fall short by in
19 rows of 20."""


def fit_probability(recipe: Recipe, memory: Memory) -> float:
    """That a run needs no more than the device has, the prediction's error being normal. 1 where
    the recipe says how much to keep free, or to ignore memory: then nothing is left to weigh."""
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return 1.0
    kept = default_constants().memory_headroom
    spread = kept / (1 - kept) / NormalDist().inv_cdf(SAFE_FIT_PROBABILITY)
    return NormalDist().cdf((memory.capacity_bytes / memory.peak_bytes - 1) / spread)


def risk_adjusted_seconds(recipe: Recipe, estimate: Estimate) -> float:
    """Of a step, over the chance of fitting; that of a layout which leaves memory_headroom free is
    1. Infinite where there is no chance."""
    chance = fit_probability(recipe, estimate.memory)
    return (
        estimate.time.step_seconds / min(1.0, chance / SAFE_FIT_PROBABILITY) if chance else math.inf
    )


def penalized_seconds(recipe: Recipe, estimate: Estimate) -> float:
    """Each moving part has to win more than what predictions are off by."""
    return with_complexity_penalty(estimate.strategy, risk_adjusted_seconds(recipe, estimate))


def with_complexity_penalty(s: Layout, seconds: float) -> float:
    """With the price of the layout's moving parts."""
    return seconds * (1 + error_benchmark().time.error) ** len(complexity_features(s))


@functools.lru_cache(maxsize=MAX_RESULTS)
def complexity_features(s: Layout) -> frozenset[str]:
    """What a layout has beyond data parallelism and ZeRO. hpZ is none: nobody chooses it, and
    nothing is lost by it."""
    return frozenset(axis.feature.format(value) for axis, value in s.enabled_axes() if axis.feature)
