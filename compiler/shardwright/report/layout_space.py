"""Price every layout of the cluster, also those that a rule or the memory forbids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardwright.cost.layout_costs import price
from shardwright.layout.layout import Layout, auto_by_default_axes
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_comparison import (
    SlowerRegion,
    binding_constraint,
    pareto_front,
    slower_regions,
)
from shardwright.search.layout_resolution import (
    allows_partial_checkpointing,
    estimate_checked_layout,
    keeps_headroom,
    resolve_layout,
    with_module_checkpointing,
    with_partial_checkpointing,
)
from shardwright.search.layout_search import search
from shardwright.search.legal_layouts import candidate_layouts, without_layout_pins
from shardwright.search.rejected_faster_layouts import RejectedFasterLayout, rejected_faster_layouts
from shardwright.search.rule_registry import check_layout

VERDICTS = ("runs", "tight", "does not fit", "ruled out")
"""Names the outcomes; tight: it fits, but by less than the error of predictions."""
MOST_FORBIDDEN = 4_000
"""Limits the forbidden layouts that are priced, a millisecond each; more are sampled evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPoint:
    """Hold one priced layout.

    code, reason: of the first rule that forbids it, or of the memory; "" where it runs
    pinned: satisfies the recipe's pins
    """

    strategy: Layout
    step_seconds: float
    peak_bytes: int
    verdict: str
    code: str
    reason: str
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """Hold all priced layouts.

    front: Pareto front of those that run and satisfy the pins, fastest first
    baselines: the best of ZeRO-2 and of ZeRO-3 without tensor or pipeline parallelism, pinned or
        not; the one nearest to fitting where none does
    slower_regions, binding, rejected_faster_layouts: as `plan` reports them
    best: the first row of `plan`
    legal, forbidden: numbers of layouts
    forbidden_drawn: forbidden layouts among the points
    """

    points: tuple[LayoutPoint, ...]
    front: tuple[Layout, ...]
    baselines: tuple[LayoutPoint, ...]
    slower_regions: tuple[SlowerRegion, ...]
    binding: str
    best: Layout | None
    rejected_faster_layouts: tuple[RejectedFasterLayout, ...]
    pins: tuple[str, ...]
    legal: int
    forbidden: int
    forbidden_drawn: int


def layout_space(problem: Problem, chosen: Estimate) -> LayoutSpace:
    """Price all layouts deterministically.

    Within the recipe's pins this is `plan`'s search; the rest shows what the pins exclude.
    """
    recipe = problem.recipe
    free = without_layout_pins(recipe)
    everywhere = dataclasses.replace(problem, recipe=free)
    legal: list[LayoutPoint] = []
    forbidden: list[tuple[Layout, str, str]] = []
    within: list[Estimate] = []
    for strategy in candidate_layouts(everywhere):
        found = check_layout(everywhere, strategy)
        error = next((d for d in found if d.severity == "error"), None)
        if error is not None:
            forbidden.append((strategy, error.code, error.message))
            continue
        layout, memory = resolve_layout(everywhere, strategy)
        pinned = _is_pinned(recipe, strategy)
        priced = [(price(layout, memory, found), pinned)]
        for recomputes_less in (with_partial_checkpointing, with_module_checkpointing):
            if less := recomputes_less(everywhere, layout, memory):
                inside = pinned and allows_partial_checkpointing(problem)
                priced.append((price(*less, found), inside))
        within += [estimate for estimate, inside in priced if inside and estimate.feasible]
        legal += [_legal_point(free, *each) for each in priced]
    if chosen.feasible and all(point.strategy != chosen.strategy for point in legal):
        within.append(chosen)  # recomputes the recipe's number of layers, not the search's
        legal.append(_legal_point(free, chosen, True))
    stride = max(1, -(-len(forbidden) // MOST_FORBIDDEN))
    drawn = [
        _point(
            estimate_checked_layout(everywhere, s, ()),
            "ruled out",
            code,
            reason,
            _is_pinned(recipe, s),
        )
        for s, code, reason in forbidden[::stride]
    ]
    result = search(problem)
    winner = result.ranked[0] if result.ranked else chosen
    return LayoutSpace(
        points=(*drawn, *legal),
        front=tuple(e.strategy for e in pareto_front(within)),
        baselines=tuple(point for stage in (2, 3) for point in _baseline(legal, stage)),
        slower_regions=slower_regions(recipe, result.ranked, result.skipped),
        binding=binding_constraint(winner, result.fastest_over_memory(winner)),
        best=result.ranked[0].strategy if result.ranked else None,
        rejected_faster_layouts=rejected_faster_layouts(recipe, result.ranked),
        pins=tuple(axis.name for axis in auto_by_default_axes() if axis.pin(recipe) is not None),
        legal=len(legal),
        forbidden=len(forbidden),
        forbidden_drawn=len(drawn),
    )


def _baseline(legal: list[LayoutPoint], zero_stage: int) -> list[LayoutPoint]:
    """Return the ZeRO baseline: the fastest that runs, else the one nearest to fitting; [] without
    any."""
    candidates = [
        p
        for p in legal
        if p.strategy.has_full_model_per_rank and p.strategy.zero_stage == zero_stage
    ]
    running = [p for p in candidates if not p.code]
    if running:
        return [min(running, key=lambda p: p.step_seconds)]
    return [min(candidates, key=lambda p: p.peak_bytes)] if candidates else []


def _is_pinned(recipe: Recipe, strategy: Layout) -> bool:
    return all(
        axis.pin(recipe) in (None, getattr(strategy, axis.name)) for axis in auto_by_default_axes()
    )


def _legal_point(recipe: Recipe, estimate: Estimate, pinned: bool) -> LayoutPoint:
    error = next((d for d in estimate.diagnostics if d.severity == "error"), None)
    if error is not None:
        return _point(estimate, "does not fit", error.code, error.message, pinned)
    return _point(
        estimate, "runs" if keeps_headroom(recipe, estimate.memory) else "tight", "", "", pinned
    )


def _point(estimate: Estimate, verdict: str, code: str, reason: str, pinned: bool) -> LayoutPoint:
    return LayoutPoint(
        strategy=estimate.strategy,
        step_seconds=estimate.time.step_seconds,
        peak_bytes=estimate.memory.peak_bytes,
        verdict=verdict,
        code=code,
        reason=reason,
        pinned=pinned,
    )
