"""`training.gradient_accumulation_dtype: auto`: fp32 for bf16, unless the two bytes a parameter
that it takes are what keeps the only fast layout out of memory. Then bf16, which is what
DeepSpeed's ZeRO sums in where nobody says."""

from __future__ import annotations

import dataclasses
from typing import cast

from shardwright.layout.formats import FORMATS
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.search.cluster_sizing import ClusterSizing, size_cluster
from shardwright.search.layout_search import (
    SearchResult,
    estimate_pinned_layout,
    search,
    search_of_equal,
)
from shardwright.search.ranking_penalties import penalized_seconds
from shardwright.utils.json_values import JsonObject

BF16_ACCUMULATION_FROM = 1.2
"""Weighed time of the best layout with sums in fp32, over that with sums in bf16, from which on
bf16 is taken: long sums lose small gradients in it, so a few percent are not worth it (SW3121)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionAccumulation:
    """Records why gradients are summed in bf16. seconds: the best layout's step with gradients
    summed in fp32; None where no layout fits. weighed: the same with its penalties."""

    seconds: float | None
    weighed: float | None


def resolve_nodes_and_accumulation_dtype(problem: Problem) -> tuple[Problem, ClusterSizing | None]:
    """Sizing: None where the recipe gave the nodes. Raises as size_cluster."""
    sized, sizing = size_cluster(problem)
    return _with_accumulation_dtype(sized), sizing


def low_precision_accumulation(problem: Problem) -> LowPrecisionAccumulation | None:
    """Return why a resolved problem sums gradients in bf16; None where the recipe says the
    dtype, or it is fp32."""
    training = cast(JsonObject, problem.recipe.document["training"])
    is_open = training.get("gradient_accumulation_dtype", "auto") == "auto"
    if not is_open or problem.recipe.training.gradient_accumulation_dtype is None:
        return None
    full = search_of_equal(_accumulating_in(problem, None)).ranked
    if not full:
        return LowPrecisionAccumulation(seconds=None, weighed=None)
    return LowPrecisionAccumulation(
        seconds=full[0].time.step_seconds, weighed=penalized_seconds(problem.recipe, full[0])
    )


def estimate_with_accumulation_dtype(problem: Problem) -> tuple[Problem, Estimate]:
    """Estimate the pinned layout; `auto` sums gradients in bf16 where it fits only so.

    The problem that is returned says which.
    """
    found, short = estimate_pinned_layout(problem), _in_half_precision(problem)
    if short is None or found.memory.fits:
        return problem, found
    half = estimate_pinned_layout(short)
    helps = half.memory.fits and half.feasible >= found.feasible
    return (short, half) if helps else (problem, found)


def _with_accumulation_dtype(problem: Problem) -> Problem:
    short = _in_half_precision(problem)
    if short is None:
        return problem
    full = search(problem)
    if not _is_memory_bound(problem, full):
        return problem
    half = search(short).ranked  # all of it: where this is the answer, it is asked for again
    if not half:
        return problem
    if full.ranked:
        slow, fast = (penalized_seconds(problem.recipe, r[0]) for r in (full.ranked, half))
        if slow < BF16_ACCUMULATION_FROM * fast:
            return problem
    return short


def _in_half_precision(problem: Problem) -> Problem | None:
    """Return the problem with gradients summed in the weights' dtype; None where the recipe does
    not leave that open."""
    training = problem.recipe.training
    wide = FORMATS[training.precision].accumulation != training.precision
    is_open = wide and training.gradient_accumulation_dtype is None
    if not is_open or problem.recipe.objective == "memory" or problem.cluster.gpu.is_cpu:
        return None
    return _accumulating_in(problem, training.precision)


def _accumulating_in(problem: Problem, dtype: str | None) -> Problem:
    training = dataclasses.replace(problem.recipe.training, gradient_accumulation_dtype=dtype)
    return dataclasses.replace(
        problem, recipe=dataclasses.replace(problem.recipe, training=training)
    )


def _is_memory_bound(problem: Problem, full: SearchResult) -> bool:
    """Return whether any layout would be faster by BF16_ACCUMULATION_FROM with the memory that
    bf16 sums free."""
    if not full.ranked:
        return full.closest is not None
    most = penalized_seconds(problem.recipe, full.ranked[0]) / BF16_ACCUMULATION_FROM
    return (
        any(e.time.step_seconds <= most for e in full.ranked)
        or full.best_nearly_fitting(most) is not None
    )
