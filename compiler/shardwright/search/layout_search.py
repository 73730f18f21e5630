"""Rank every layout that the rules allow, and say why the others are rejected."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from shardwright.cost.layout_costs import price
from shardwright.cost.peak_memory import memory_is_accepted
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic, Refusal, refusal
from shardwright.layout.axes import AXES
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import (
    allows_partial_checkpointing,
    estimate_layout,
    resolve_layout,
    with_module_checkpointing,
    with_partial_checkpointing,
)
from shardwright.search.legal_layouts import (
    Legal,
    RejectedRegion,
    Rejections,
    RulesByLevel,
    candidate_layouts,
    layout_grids,
    layouts_of,
    legal_layouts,
    legal_layouts_of,
    pinned_layout,
    split_grid,
    zero_baseline,
)
from shardwright.search.over_memory_layouts import (
    MEMORY_BOUND_FROM,
    NEXT_GPU_MEMORY_FACTOR,
    OverMemoryLayouts,
)
from shardwright.search.ranking_penalties import penalized_seconds, with_complexity_penalty
from shardwright.search.rule_registry import UNPRICEABLE_CODES, check_layout
from shardwright.search.step_time_bound import (
    ALWAYS_PRICED,
    ALWAYS_PRICED_FACTOR,
    PRICED_FACTOR,
    PRICED_WHOLE,
    WORK_AXES,
    StepTimeBound,
)

NEARLY_FITS_FACTOR = 4 / 3
"""Sums of gradients in half precision save up to a quarter of a rank's bytes: 2 of 8 a parameter
under ZeRO-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Holds what a search found.

    ranked: the feasible layouts, best first. rejected: one region for each code, the largest
    first. skipped: legal layouts that are certainly slower, and the seconds that each takes at
    least (step_time_bound.py), the fastest first. closest: the legal layout that misses memory
    by least, where none fits. over_memory: the legal layouts that do not fit.
    """

    ranked: tuple[Estimate, ...]
    rejected: tuple[RejectedRegion, ...]
    skipped: tuple[tuple[float, Layout], ...]
    closest: Estimate | None
    over_memory: OverMemoryLayouts
    seconds: float

    def fastest_over_memory(self, winner: Estimate) -> Estimate | None:
        """Return the best layout that fits in NEXT_GPU_MEMORY_FACTOR times the memory and is
        faster than the winner by MEMORY_BOUND_FROM; None where no layout fits at all."""
        below = winner.time.step_seconds * (1 - MEMORY_BOUND_FROM)
        return self.over_memory.fastest(NEXT_GPU_MEMORY_FACTOR, below) if self.ranked else None

    def best_nearly_fitting(self, below: float) -> Estimate | None:
        """Return the best layout that fits in NEARLY_FITS_FACTOR times the memory and whose step
        takes less than `below` seconds."""
        return self.over_memory.fastest(NEARLY_FITS_FACTOR, below)


_MEMOIZED: list[tuple[Problem, SearchResult]] = []
_MOST_KNOWN = 8


def search(problem: Problem) -> SearchResult:
    """Rank the legal layouts of a problem. The same object is searched once: a command asks
    several times."""
    found = next((result for known, result in _MEMOIZED if known is problem), None)
    if found is None:
        found = _search(problem)
        _MEMOIZED[:] = [*_MEMOIZED[1 - _MOST_KNOWN :], (problem, found)]
    return found


def search_of_equal(problem: Problem) -> SearchResult:
    """Return the search of an equal problem that a command has made already, or make one."""
    return search(next((known for known, _ in _MEMOIZED if known == problem), problem))


@dataclass(slots=True)
class _Best:
    """Tracks the best layout priced so far. weighed: its step seconds with the penalties for
    risk and complexity; priced: how many layouts are priced."""

    weighed: float = math.inf
    step: float = math.inf
    priced: int = 0

    def take(self, recipe: Recipe, found: Sequence[Estimate]) -> None:
        self.priced += len(found)
        each = [(penalized_seconds(recipe, e), e.time.step_seconds) for e in found]
        self.weighed, self.step = min([(self.weighed, self.step), *each])

    def is_near(self, strategy: Layout, least: float) -> bool:
        """Return whether a layout that takes at least `least` seconds is worth pricing."""
        if self.priced < ALWAYS_PRICED and least <= ALWAYS_PRICED_FACTOR * self.step:
            return True
        return (
            least <= self.step
            or with_complexity_penalty(strategy, least) <= PRICED_FACTOR * self.weighed
        )

    def may_win(self, strategy: Layout, least: float) -> bool:
        """Return whether a layout that takes at least `least` seconds may be the best one."""
        return with_complexity_penalty(strategy, least) <= self.weighed


def best_layout(problem: Problem) -> Estimate | None:
    """Return the best feasible layout, to compare another plan with; no other layout is kept.
    Branch and bound: the least bound comes first, until none that is left can be better."""
    if problem.recipe.objective == "memory":  # the bound is one of time
        return next(iter(_search(problem).ranked), None)
    recipe, bound = problem.recipe, StepTimeBound(problem)
    unopened = _legal_grids(problem, bound)
    waiting: list[tuple[float, int, int, bool]] = []
    groups: list[tuple[Legal, ...]] = []
    fitting: list[int] = []
    """Counts, by group, the micro-batch sizes that may fit, from the smallest on."""
    best, found = _Best(), []
    while waiting or unopened:
        opens = bool(unopened) and (not waiting or unopened[-1][0] <= waiting[0][0])
        least = unopened[-1][0] if opens else waiting[0][0]
        if least > best.weighed:
            break
        if opens:
            # Where the smallest micro-batch has no room, none has.
            for group in (g for g in unopened.pop()[1] if bound.may_fit(g[0][0])):
                # With no layer recomputed first, for which three layouts have one bound.
                for place, (strategy, _) in enumerate(group):
                    kept = bound.least_seconds_without_recompute(strategy)
                    weighed = with_complexity_penalty(strategy, kept)
                    heapq.heappush(waiting, (weighed, len(groups), place, False))
                groups.append(group)
                fitting.append(len(group))
            continue
        _, number, place, is_own = heapq.heappop(waiting)
        if place >= fitting[number]:
            continue
        strategy, warnings = groups[number][place]
        if not is_own:
            stands = _covers_partial_checkpointing(problem, strategy)
            own = with_complexity_penalty(
                strategy, bound.tight_least_seconds(strategy, allows_partial_checkpointing=stands)
            )
            if own > least:
                heapq.heappush(waiting, (own, number, place, True))
                continue
        layout, memory = resolve_layout(problem, strategy)
        if not memory_is_accepted(recipe, memory):
            fitting[number] = place
            continue
        priced = _priced(problem, bound, layout, memory, warnings, best.may_win)
        found += priced
        best.take(recipe, priced)
    return min(found, key=lambda e: rank_key(recipe, e), default=None)


def _legal_grids(
    problem: Problem, bound: StepTimeBound
) -> list[tuple[float, Iterator[tuple[Legal, ...]]]]:
    """Split the grids along WORK_AXES. Return the groups of each part, and the seconds that each
    of its layouts takes at least, complexity penalties included; the fastest part last."""
    rules = RulesByLevel(problem.recipe.target)
    split = set(WORK_AXES) - {"micro_batch_size", "activation_checkpointing", "overlapped_share"}
    if problem.recipe.parallelism.expert_overlap:
        split.add("pipeline")  # which decides how much overlaps
    found = []
    for grid in (part for every in layout_grids(problem) for part in split_grid(every, split)):
        groups = legal_layouts_of(problem, grid, Rejections(), rules)
        if (first := next(groups, None)) is not None:
            least = min(
                with_complexity_penalty(s, bound.mean_rank_seconds(s))
                for s in layouts_of(problem.recipe, grid, {"micro_batch_size", "schedule"})
            )
            found.append((least, itertools.chain([first], groups)))
    return sorted(found, key=operator.itemgetter(0), reverse=True)


def _covers_partial_checkpointing(problem: Problem, strategy: Layout) -> bool:
    """Return whether the layout also stands for those that recompute fewer layers."""
    return strategy.activation_checkpointing == "full" and allows_partial_checkpointing(problem)


def _priced(
    problem: Problem,
    bound: StepTimeBound | None,
    layout: PricedLayout,
    memory: Memory,
    warnings: tuple[Diagnostic, ...],
    matters: Callable[[Layout, float], bool],
) -> list[Estimate]:
    """Price a layout that fits and, beside one that recomputes all layers, the one that
    recomputes fewer, and the one that recomputes modules of them. matters: whether a layout that
    takes at least so many seconds is worth it."""
    found: list[Estimate] = []

    def take(layout: PricedLayout, memory: Memory) -> None:
        if bound is None or matters(layout.strategy, bound.least_interleaved_step_seconds(layout)):
            found.append(price(layout, memory, warnings))

    take(layout, memory)
    if bound is None or matters(
        layout.strategy, bound.least_partial_checkpointing_seconds(layout.strategy)
    ):
        less = with_partial_checkpointing(problem, layout, memory)
        if less:
            take(*less)
    if bound is None or matters(
        layout.strategy, bound.least_module_checkpointing_seconds(layout.strategy)
    ):
        modules = with_module_checkpointing(problem, layout, memory)
        if modules:
            take(*modules)
    return found


def _search(problem: Problem) -> SearchResult:
    """Rank the legal layouts. Never raises for an illegal layout: that one is in `rejected`.
    Deterministic but for `seconds`.

    Exhaustive, with three shortcuts. A rule rejects all layouts that differ in keys it does not
    read. Where a micro-batch size does not fit, no larger one does: activations and logits grow
    with it, and nothing shrinks. Of more than PRICED_WHOLE layouts, one that certainly takes
    longer than the best by PRICED_FACTOR, complexity penalty included, is skipped; the first
    ALWAYS_PRICED are priced up to ALWAYS_PRICED_FACTOR. Beside a layout that recomputes all
    layers stand the one that recomputes fewer of them and the one that recomputes modules of each,
    where they are faster.
    """
    recipe = problem.recipe
    started = time.perf_counter()
    feasible: list[Estimate] = []
    skipped: list[tuple[float, Layout]] = []
    rejections = Rejections()
    best = _Best()
    bound, groups = _groups(problem, rejections)
    over_memory = OverMemoryLayouts(problem, bound)
    for group in _least_first(problem, bound, groups, best):
        for place, (least, less, strategy, warnings) in enumerate(group):
            least, matters = (
                min(least, less),
                best.is_near(strategy, least) or best.is_near(strategy, less),
            )
            if least < math.inf and not matters:
                skipped.append((least, strategy))
                continue
            layout, memory = resolve_layout(problem, strategy) if least < math.inf else (None, None)
            if layout is None or memory is None or not memory_is_accepted(recipe, memory):
                rejections.add(
                    over_memory.add(strategy, warnings, layout, memory),
                    strategy,
                    len(group) - place,
                )
                break
            found = _priced(problem, bound, layout, memory, warnings, best.is_near)
            if bound is not None and all(e.strategy != layout.strategy for e in found):
                skipped.append((bound.least_interleaved_step_seconds(layout), strategy))
            feasible += found
            best.take(recipe, found)
    feasible.sort(key=lambda e: rank_key(recipe, e))
    closest = None if feasible else over_memory.closest()
    return SearchResult(
        ranked=tuple(feasible),
        rejected=rejections.largest_first(),
        skipped=tuple(sorted(skipped, key=lambda each: (each[0], str(each[1])))),
        closest=closest,
        over_memory=over_memory,
        seconds=time.perf_counter() - started,
    )


class _Bounded(NamedTuple):
    """Bounds a layout. least: the seconds it takes at least. less: the same for the partial
    checkpointing it covers."""

    least: float
    less: float
    strategy: Layout
    warnings: tuple[Diagnostic, ...]


_Group = list[_Bounded]


def _groups(problem: Problem, rejections: Rejections) -> tuple[StepTimeBound | None, list[_Group]]:
    """Return the legal layouts by group; with many of them, also the bound and what each takes
    at least."""
    legal = list(legal_layouts(problem, rejections))
    if sum(map(len, legal)) <= PRICED_WHOLE or problem.recipe.objective == "memory":
        return None, [[_Bounded(0.0, math.inf, *each) for each in group] for group in legal]
    bound = StepTimeBound(problem)
    return bound, [_bounded(problem, bound, group) for group in legal]


def _bounded(problem: Problem, bound: StepTimeBound, group: tuple[Legal, ...]) -> _Group:
    """Bound each layout of a group; infinite from the first one on that certainly does not fit."""
    stands = _covers_partial_checkpointing(problem, group[0][0])
    least = bound.least_seconds_without_recompute if stands else bound.least_seconds
    room = 0
    if bound.may_fit(group[0][0]):
        larger = [strategy for strategy, _ in group[1:]]
        room = 1 + bisect.bisect_left(larger, True, key=lambda s: not bound.layers_may_fit(s))
    return [
        _Bounded(least(strategy) if place < room else math.inf, math.inf, strategy, warnings)
        for place, (strategy, warnings) in enumerate(group)
    ]


def _least_first(
    problem: Problem, bound: StepTimeBound | None, groups: list[_Group], best: _Best
) -> Iterator[_Group]:
    """Yield the group that can be fastest first. The tighter bound is computed only for groups
    that may still matter."""
    if bound is None:
        yield from groups
        return
    waiting = [
        (min(each.least for each in group), number, False) for number, group in enumerate(groups)
    ]
    heapq.heapify(waiting)
    while waiting:
        _, number, is_placed = heapq.heappop(waiting)
        if not is_placed and any(
            best.is_near(each.strategy, each.least) for each in groups[number]
        ):
            groups[number] = group = [
                _placed(problem, bound, each, best) for each in groups[number]
            ]
            heapq.heappush(
                waiting, (min(min(each.least, each.less) for each in group), number, True)
            )
        else:
            yield groups[number]


def _placed(problem: Problem, bound: StepTimeBound, each: _Bounded, best: _Best) -> _Bounded:
    if each.least == math.inf or not best.is_near(each.strategy, each.least):
        return each
    stands = _covers_partial_checkpointing(problem, each.strategy)
    less = math.inf
    if stands:
        less = min(
            bound.least_partial_checkpointing_seconds(each.strategy),
            bound.least_module_checkpointing_seconds(each.strategy),
        )
    return each._replace(least=bound.tight_least_seconds(each.strategy), less=less)


def rank_key(recipe: Recipe, estimate: Estimate) -> tuple[float | int | str, ...]:
    """Order by the objective (a fixed cluster costs what its time costs), then the simpler
    layout, then the other keys."""
    strategy = estimate.strategy
    goal = (
        estimate.memory.peak_bytes
        if recipe.objective == "memory"
        else penalized_seconds(recipe, estimate)
    )
    other = (
        estimate.time.step_seconds if recipe.objective == "memory" else estimate.memory.peak_bytes
    )
    # Nine digits: what floating-point noise decides would not be a choice.
    regions = (getattr(strategy, axis.name) for axis in AXES if axis.splits_results)
    rest = (getattr(strategy, axis.name) for axis in reversed(AXES) if axis.section)
    words = (value if isinstance(value, int) else str(value) for value in rest)
    return (float(f"{goal:.9g}"), *regions, float(f"{other:.9g}"), *words)


def choose_layout(problem: Problem) -> Estimate:
    """Return the best feasible layout. Raises the rules that the pins break, or SW3202 where
    nothing fits."""
    cluster = problem.cluster
    result = search(problem)
    if result.ranked:
        return result.ranked[0]
    if result.closest is not None:
        raise _nothing_fits(result.closest, cluster)
    raise Refusal(*fewest_layout_errors(problem))


def fewest_layout_errors(problem: Problem) -> tuple[Diagnostic, ...]:
    """Return the errors of the layout within the pins that breaks the fewest rules."""
    recipe, cluster = problem.recipe, problem.cluster
    found = (
        tuple(d for d in check_layout(problem, strategy) if d.severity == "error")
        for strategy in candidate_layouts(problem)
    )
    fewest = min(found, key=len, default=())
    if fewest:
        return fewest
    # No layout multiplies out: explain the pinned one, but not by the values that only fill the
    # gaps.
    pins = recipe.parallelism
    pinned = {
        ("parallelism", field.name)
        for field in fields(pins)
        if getattr(pins, field.name) is not None
    }
    errors = tuple(
        d
        for d in check_layout(problem, pinned_layout(recipe, cluster))
        if d.severity == "error"
        and (
            d.code in UNPRICEABLE_CODES
            or d.key is None
            or d.key[0] != "parallelism"
            or d.key in pinned
        )
    )
    return errors or (
        Diagnostic(
            code="SW3203",
            message=f"no layout of {cluster.world_size} GPUs divides a global batch of "
            f"{recipe.training.global_batch_size}",
            help="Choose a global_batch_size with more divisors, or pin fewer keys.",
            key=("training", "global_batch_size"),
        ),
    )


def estimate_pinned_layout(problem: Problem) -> Estimate:
    """Return what `estimate` prints: the pinned layout, with `auto` filled by the search.

    Where no layout within the pins is feasible, the one that breaks the fewest rules is priced
    all the same. Raises Refusal where none multiplies out to the world and the batch.
    """
    recipe = problem.recipe
    strategies = tuple(candidate_layouts(problem))
    if len(strategies) == 1:
        return estimate_layout(problem, strategies[0])
    result = search(problem)
    if result.ranked:
        return result.ranked[0]
    if result.closest is not None:
        return result.closest
    if not strategies:
        raise Refusal(*fewest_layout_errors(problem))

    def errors(strategy: Layout) -> int:
        return sum(d.severity == "error" for d in check_layout(problem, strategy))

    fewest = min(errors(s) for s in strategies)
    priced = [estimate_layout(problem, s) for s in strategies if errors(s) == fewest]
    return min(
        priced, key=lambda e: (not memory_is_accepted(recipe, e.memory), rank_key(recipe, e))
    )


def baselines(problem: Problem) -> tuple[Estimate, ...]:
    """Return the best layouts with pipeline 1 and tensor 1 under ZeRO-2 and ZeRO-3, the usual
    baselines.

    Pins on the layout do not apply. Where no layout fits, the one nearest to fitting is
    returned; none where the batch does not divide.
    """
    recipes = (zero_baseline(problem.recipe, zero_stage=zero_stage) for zero_stage in (2, 3))
    results = [search(dataclasses.replace(problem, recipe=recipe)) for recipe in recipes]
    best = (result.ranked[0] if result.ranked else result.closest for result in results)
    return tuple(estimate for estimate in best if estimate is not None)


NO_MORE_RECOMPUTE = (
    "Every layer is recomputed already. What longer rows take elsewhere, feed-forward layers in "
    "tiles and the inputs of layers kept in host memory (arXiv 2506.13996), this version does not "
    "have."
)


def _nothing_fits(closest: Estimate, cluster: Cluster) -> Refusal:
    memory = closest.memory
    fullest = max(memory.stages, key=lambda stage: stage.peak_bytes)
    states = fullest.parameters_bytes + fullest.gradients_bytes + fullest.optimizer_bytes
    _, remedy = max(
        (states, "model states: more nodes, or GPUs with more memory,"),
        (fullest.activations_bytes, "activations: a shorter sequence, or GPUs with more memory,"),
        (
            fullest.workspace_bytes,
            "workspace (logits, buffers, the libraries' own): GPUs with more memory",
        ),
        key=lambda part: part[0],
    )
    if fullest.activations_bytes > states and closest.strategy.activation_checkpointing == "full":
        remedy = f"{remedy} would help. {NO_MORE_RECOMPUTE}"
    else:
        remedy = f"{remedy} would help."
    return refusal(
        "SW3202",
        f"the model does not fit anywhere on {cluster.world_size} x {cluster.gpu.name}: the "
        f"closest layout needs {memory.peak_bytes / 2**30:.1f} GiB of "
        f"{memory.capacity_bytes / 2**30:.1f} GiB",
        f"The closest layout is {closest.strategy.describe()}. Most of it is {remedy}",
        key=("cluster", "nodes"),
    )
