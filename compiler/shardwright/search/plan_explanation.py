"""Explain a layout: what it consists of, what each of its keys would cost otherwise, and what
comes next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cost.layout_costs import Breakdown, break_down, price
from shardwright.cost.peak_memory import estimate_memory, memory_is_accepted
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.layout.gpu_cluster import Cluster, Gpu
from shardwright.layout.layout import Layout, axes_in_print_order, searched_axes
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.accumulation_dtype_choice import (
    estimate_with_accumulation_dtype,
    resolve_nodes_and_accumulation_dtype,
)
from shardwright.search.engine_choice import OtherEngine, other_engine
from shardwright.search.layout_comparison import because, binding_constraint
from shardwright.search.layout_resolution import (
    estimate_layout,
    keeps_headroom,
    price_planned_layout,
    with_hpz,
    without_hpz,
)
from shardwright.search.layout_search import SearchResult, rank_key, search
from shardwright.search.legal_layouts import RejectedRegion, without_layout_pins
from shardwright.search.rejected_faster_layouts import RejectedFasterLayout, rejected_faster_layouts

# What a little more of each resource would change: the chosen layout priced again, and the search
# run again.


MORE_FACTOR = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Says what a better cluster brings. same: the chosen layout there; best: the layout that a
    search finds there, None where none fits."""

    resource: str
    same: Estimate
    best: Estimate | None


def sensitivities(problem: Problem, chosen: Estimate) -> tuple[Sensitivity, ...]:
    """Price the plan on clusters with more of one resource each. Resources without a use are
    left out (links between nodes, on one node)."""
    cluster = problem.cluster
    found: list[Sensitivity] = []
    for resource, (matters, better) in RESOURCES.items():
        if matters(cluster):
            there = dataclasses.replace(problem, cluster=better(cluster))
            same, best = (
                estimate_layout(there, chosen.strategy),
                next(iter(search(there).ranked), None),
            )
            found.append(Sensitivity(resource=resource, same=same, best=best))
    return tuple(found)


def _faster_gpu(cluster: Cluster) -> Cluster:
    """Return a cluster of twice as fast GPUs at the same energy per FLOP; with the old power
    limit the board would throttle the gain away."""
    gpu = cluster.gpu
    peaks = {precision: flops * MORE_FACTOR for precision, flops in gpu.peak_flops.items()}
    watts = None if gpu.watts is None else gpu.watts * MORE_FACTOR
    best = None if gpu.best_product_flops is None else gpu.best_product_flops * MORE_FACTOR
    rates = gpu.attention_flops
    return _with_gpu(
        cluster,
        peak_flops=peaks,
        watts=watts,
        best_product_flops=best,
        attention_flops=None if rates is None else tuple(rate * MORE_FACTOR for rate in rates),
    )


def _with_gpu(cluster: Cluster, **changes: object) -> Cluster:
    changed: Gpu = dataclasses.replace(cluster.gpu, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(cluster, gpu=changed)


# resource -> whether a cluster has a use for it, and the cluster with more of it
RESOURCES: dict[str, tuple[Callable[[Cluster], bool], Callable[[Cluster], Cluster]]] = {
    "inter_node_bandwidth": (
        lambda c: c.nvlink_domains > 1,
        lambda c: dataclasses.replace(
            c, inter_node_bytes_per_second=c.inter_node_bytes_per_second * MORE_FACTOR
        ),
    ),
    "intra_node_bandwidth": (
        lambda c: c.nvlink_domain_gpus > 1,
        lambda c: dataclasses.replace(
            c, intra_node_bytes_per_second=c.intra_node_bytes_per_second * MORE_FACTOR
        ),
    ),
    "memory": (lambda c: True, lambda c: _with_gpu(c, memory_gib=c.gpu.memory_gib * MORE_FACTOR)),
    "memory_bandwidth": (
        lambda c: True,
        lambda c: _with_gpu(c, hbm_bytes_per_second=c.gpu.hbm_bytes_per_second * MORE_FACTOR),
    ),
    "peak_flops": (lambda c: True, _faster_gpu),
}


NEXT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeLayout:
    """Compares another layout that runs. slower: its step over the chosen one's, less 1.
    because: the part of the step by which it is worse. wins: it is the better one, which only
    pins can bring about; then because is about the chosen one."""

    strategy: Layout
    step_seconds: float
    peak_bytes: int
    slower: float
    because: str
    wins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExplanation:
    """Compares one key of the layout. other: the best layout with another value of the key.

    Where no such layout runs or is worth pricing it is None; then least_seconds is the least that
    the fastest of those takes, or refused is a region that says why. Neither is set where the
    key has no other value.
    """

    key: str
    value: int | str
    pinned: bool
    other: AlternativeLayout | None
    least_seconds: float | None
    refused: RejectedRegion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HpzAlternative:
    """Compares hpZ's copy of the weights inside each node with going without. taken: the chosen
    layout has the copy; other_*: the same layout the other way. has_headroom: the prediction's
    error stays free beside it."""

    ranks: int
    taken: bool
    has_headroom: bool
    other_step_seconds: float
    other_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExplanation:
    """Explains a plan.

    place: of the chosen layout among all that run without the recipe's pins, from 1; None where
    it does not run. next_best: the layouts after the chosen one within the pins or, where the
    pins leave no other, the best ones without them. rejected: one region for each code, without
    the pins. hpz_alternative: None where hpZ cannot run. rejected_faster_layouts: where the
    chosen layout is the best within the pins. other_engine: where a layout runs under it.
    """

    chosen: Estimate
    breakdown: Breakdown
    binding: str
    keys: tuple[KeyExplanation, ...]
    place: int | None
    layouts: int
    next_best: tuple[AlternativeLayout, ...]
    next_best_without_pins: bool
    sensitivity: tuple[Sensitivity, ...]
    rejected: tuple[RejectedRegion, ...]
    hpz_alternative: HpzAlternative | None
    rejected_faster_layouts: tuple[RejectedFasterLayout, ...]
    other_engine: OtherEngine | None


def explain(problem: Problem, chosen: Estimate) -> PlanExplanation:
    """Explain the chosen layout, whose degrees multiply to the world size and the batch. Runs
    about seven searches."""
    recipe = problem.recipe
    layout, _ = price_planned_layout(problem, chosen.strategy, chosen.boundaries)
    within = search(problem)
    pinned = pinned_keys(recipe)
    everywhere = (
        search(dataclasses.replace(problem, recipe=without_layout_pins(recipe)))
        if pinned
        else within
    )
    inside = [e.strategy for e in within.ranked]
    after = list(
        within.ranked[inside.index(chosen.strategy) + 1 if chosen.strategy in inside else 0 :]
    )
    next_best_without_pins = not after and bool(pinned)
    if next_best_without_pins:
        after = [e for e in everywhere.ranked if e.strategy != chosen.strategy]
    return PlanExplanation(
        chosen=chosen,
        breakdown=break_down(layout, chosen),
        binding=binding_constraint(chosen, within.fastest_over_memory(chosen)),
        keys=tuple(
            _reason(recipe, everywhere, chosen, axis.name, axis.name in pinned)
            for axis in searched_axes(recipe)
        ),
        place=_place(recipe, everywhere, chosen),
        layouts=len(everywhere.ranked),
        next_best=tuple(alternative(recipe, e, chosen) for e in after[:NEXT]),
        next_best_without_pins=next_best_without_pins,
        sensitivity=sensitivities(problem, chosen),
        rejected=everywhere.rejected,
        hpz_alternative=_second_copy(layout, chosen),
        rejected_faster_layouts=rejected_faster_layouts(recipe, within.ranked)
        if inside[:1] == [chosen.strategy]
        else (),
        other_engine=other_engine(problem, chosen) if chosen.feasible else None,
    )


def _place(recipe: Recipe, everywhere: SearchResult, chosen: Estimate) -> int | None:
    """Return the place of the chosen layout in the search's ranking; None where the recipe pins
    a number of recomputed layers that the search does not try."""
    order = [e.strategy for e in everywhere.ranked]
    if chosen.strategy in order:
        return order.index(chosen.strategy) + 1
    key = rank_key(recipe, chosen)
    return (
        1 + sum(rank_key(recipe, e) < key for e in everywhere.ranked) if chosen.feasible else None
    )


def _second_copy(layout: PricedLayout, chosen: Estimate) -> HpzAlternative | None:
    copied = with_hpz(layout)
    if copied is None:
        return None
    taken = layout.strategy.hpz_partition_size > 1
    other = without_hpz(layout) if taken else copied
    estimate = price(other, estimate_memory(other), ())
    beside = chosen if taken else estimate
    return HpzAlternative(
        ranks=copied.strategy.hpz_partition_size,
        taken=taken,
        has_headroom=memory_is_accepted(layout.recipe, beside.memory)
        and keeps_headroom(layout.recipe, beside.memory),
        other_step_seconds=estimate.time.step_seconds,
        other_peak_bytes=estimate.memory.peak_bytes,
    )


def pinned_keys(recipe: Recipe) -> tuple[str, ...]:
    """Return the layout keys that the recipe gives; defaults (`offload: none`) do not count."""
    keys = (
        axis
        for axis in axes_in_print_order()
        if axis.section == "parallelism" and axis.values is not None
    )
    return tuple(axis.name for axis in keys if axis.pin(recipe) not in (None, axis.default))


def alternative(recipe: Recipe, estimate: Estimate, chosen: Estimate) -> AlternativeLayout:
    step = estimate.time.step_seconds
    wins = rank_key(recipe, estimate) < rank_key(recipe, chosen)
    return AlternativeLayout(
        strategy=estimate.strategy,
        step_seconds=step,
        peak_bytes=estimate.memory.peak_bytes,
        slower=step / chosen.time.step_seconds - 1,
        because=because(recipe, chosen, estimate) if wins else because(recipe, estimate, chosen),
        wins=wins,
    )


def _reason(
    recipe: Recipe, everywhere: SearchResult, chosen: Estimate, key: str, pinned: bool
) -> KeyExplanation:
    value = getattr(chosen.strategy, key)
    other = next((e for e in everywhere.ranked if getattr(e.strategy, key) != value), None)
    least_seconds = next(
        (least for least, s in everywhere.skipped if getattr(s, key) != value), None
    )
    refused = next((r for r in everywhere.rejected if getattr(r.example, key) != value), None)
    return KeyExplanation(
        key=key,
        value=value,
        pinned=pinned,
        other=None if other is None else alternative(recipe, other, chosen),
        least_seconds=least_seconds if other is None else None,
        refused=refused if other is None and least_seconds is None else None,
    )


# Why the plan is not some other layout: the rule that forbids all of it, or what its best
# completion loses by.


CHOSEN, LOSES, WINS, FORBIDDEN, TOO_LARGE = "chosen", "loses", "wins", "forbidden", "does not fit"
MEMORY_CODE = "SW3201"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNotResult:
    """Answers `--why-not`.

    verdict: chosen (it is the plan), loses (it runs, and ranks behind the plan), wins (it ranks
    before the plan, which other pins hold), forbidden (a rule), does not fit (memory). estimate:
    of the best completion, as `estimate` prints it; None where nothing can be counted.
    diagnostics: the rules it breaks, or the warnings about it. because: the part of the step, or
    the memory, that decides.
    """

    verdict: str
    estimate: Estimate | None
    diagnostics: tuple[Diagnostic, ...]
    because: str


def why_not(problem: Problem, chosen: Estimate) -> WhyNotResult:
    """Answer why a region is not the plan. problem: its recipe pins the keys that are asked
    about, and nothing else of the layout."""
    asked = problem.recipe
    try:
        resolved, _ = resolve_nodes_and_accumulation_dtype(problem)
        _, best = estimate_with_accumulation_dtype(resolved)
    except Refusal as refusal:
        return refused(refusal)
    errors = [d for d in best.diagnostics if d.severity == "error"]
    if errors:
        verdict = TOO_LARGE if all(d.code == MEMORY_CODE for d in errors) else FORBIDDEN
        reason = errors[0].message
    elif best.strategy == chosen.strategy:
        verdict, reason = CHOSEN, ""
    elif not chosen.feasible:
        verdict, reason = WINS, "the plan itself does not run"
    elif rank_key(asked, best) < rank_key(asked, chosen):
        verdict, reason = WINS, because(asked, chosen, best)
    else:
        verdict, reason = LOSES, because(asked, best, chosen)
    return WhyNotResult(
        verdict=verdict, estimate=best, diagnostics=best.diagnostics, because=reason
    )


def refused(refusal: Refusal) -> WhyNotResult:
    """Return the answer where no layout multiplies out to the GPUs and the batch."""
    found = refusal.diagnostics
    return WhyNotResult(
        verdict=FORBIDDEN, estimate=None, diagnostics=tuple(found), because=found[0].message
    )
