"""Weigh a layout for the ranking: its step time over the probability that it fits, and a penalty
for each feature it adds."""

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
    """Return the probability that a run needs no more memory than the device has, with a normal
    prediction error. It is 1 where the recipe sets memory_headroom or ignores memory."""
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return 1.0
    kept = default_constants().memory_headroom
    spread = kept / (1 - kept) / NormalDist().inv_cdf(SAFE_FIT_PROBABILITY)
    return NormalDist().cdf((memory.capacity_bytes / memory.peak_bytes - 1) / spread)


def risk_adjusted_seconds(recipe: Recipe, estimate: Estimate) -> float:
    """Return step seconds over the probability of fitting, relative to a layout that keeps
    memory_headroom free. Infinite at probability 0."""
    chance = fit_probability(recipe, estimate.memory)
    return (
        estimate.time.step_seconds / min(1.0, chance / SAFE_FIT_PROBABILITY) if chance else math.inf
    )


def penalized_seconds(recipe: Recipe, estimate: Estimate) -> float:
    """Return risk-adjusted seconds with the complexity penalty: each added feature has to win
    more than the prediction's error."""
    return with_complexity_penalty(estimate.strategy, risk_adjusted_seconds(recipe, estimate))


def with_complexity_penalty(s: Layout, seconds: float) -> float:
    """Multiply seconds by the penalty for each of the layout's features."""
    return seconds * (1 + error_benchmark().time.error) ** len(complexity_features(s))


@functools.lru_cache(maxsize=MAX_RESULTS)
def complexity_features(s: Layout) -> frozenset[str]:
    """Return what a layout has beyond data parallelism and ZeRO. hpZ does not count: nobody
    chooses it, and it takes nothing away."""
    return frozenset(axis.feature.format(value) for axis, value in s.enabled_axes() if axis.feature)
