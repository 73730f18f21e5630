"""Compare ranked layouts: the Pareto front, why each other region is slower, and what binds the
winner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.layout.axes import AXES, Value
from shardwright.layout.layout import Layout, in_layer_collectives_text
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.over_memory_layouts import MEMORY_BOUND_FROM
from shardwright.search.ranking_penalties import (
    complexity_features,
    risk_adjusted_seconds,
)

# The parts of a step, as `Time` names them, in words; {} is in_layer_collectives_text() of the
# layouts at hand.
PARTS = {
    "compute_seconds": "computation",
    "tensor_comm_seconds": "{} collectives",
    "pipeline_comm_seconds": "sends between stages",
    "data_comm_seconds": "data-parallel collectives",
    "outer_comm_seconds": "the outer step between islands",
    "optimizer_seconds": "the optimizer",
    "bubble_seconds": "the pipeline's idle time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerRegion:
    """Compares the feasible layouts of another region with the winner.

    where: the keys that make the region, and their values. best: the best priced layout. slower:
    its step over the winner's, less 1. because: the part of the step that costs it most.
    at_least: a lower bound of slower, where a skipped layout may be faster than the best; None
    elsewhere.
    """

    where: tuple[tuple[str, Value], ...]
    layouts: int
    best: Layout
    step_seconds: float
    peak_bytes: int
    slower: float
    because: str
    at_least: float | None = None

    @property
    def nearest(self) -> float:
        return self.slower if self.at_least is None else self.at_least


def pareto_front(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Return the layouts that no other one beats in both step time and peak memory, fastest
    first."""
    front: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.time.step_seconds, e.memory.peak_bytes)):
        if not front or estimate.memory.peak_bytes < front[-1].memory.peak_bytes:
            front.append(estimate)
    return tuple(front)


def slower_regions(
    recipe: Recipe, ranked: Sequence[Estimate], skipped: Iterable[tuple[float, Layout]] = ()
) -> tuple[SlowerRegion, ...]:
    """Return the regions that are not the winner's, the nearest first. ranked: best first.
    skipped: layouts that are not priced, and what each takes at least."""
    if not ranked:
        return ()
    winner = ranked[0]
    keys = [axis.name for axis in AXES if axis.splits_results]

    def region_of(strategy: Layout) -> tuple[Value, ...]:
        return tuple(getattr(strategy, key) for key in keys)

    regions: dict[tuple[Value, ...], list[Estimate]] = {}
    for estimate in ranked:
        regions.setdefault(region_of(estimate.strategy), []).append(estimate)
    least_seconds: dict[tuple[Value, ...], float] = {}
    for least, strategy in skipped:
        where = region_of(strategy)
        least_seconds[where] = min(least, least_seconds.get(where, math.inf))
    found = (
        SlowerRegion(
            where=tuple(zip(keys, values, strict=True)),
            layouts=len(members),
            best=members[0].strategy,
            step_seconds=members[0].time.step_seconds,
            peak_bytes=members[0].memory.peak_bytes,
            slower=members[0].time.step_seconds / winner.time.step_seconds - 1,
            because=because(recipe, members[0], winner),
            at_least=_below(least_seconds.get(values, math.inf), members[0], winner),
        )
        for values, members in list(regions.items())[1:]
    )
    return (
        tuple(sorted(found, key=lambda region: region.nearest)) if least_seconds else tuple(found)
    )


def _below(skipped_seconds: float, best: Estimate, winner: Estimate) -> float | None:
    """Return how much slower than the winner the skipped layouts are at least, as a share; None
    where the best priced one is faster than that."""
    is_less = skipped_seconds < best.time.step_seconds
    return skipped_seconds / winner.time.step_seconds - 1 if is_less else None


def because(recipe: Recipe, estimate: Estimate, winner: Estimate) -> str:
    """Explain in a phrase why `winner` ranks before `estimate`, with the figures of both."""
    if recipe.objective == "memory" and estimate.memory.peak_bytes > winner.memory.peak_bytes:
        return f"{_gib(estimate)} GiB against {_gib(winner)}"
    if risk_adjusted_seconds(recipe, estimate) >= risk_adjusted_seconds(
        recipe, winner
    ) and _is_faster(estimate, winner):
        return (
            f"{_gib(estimate)} of {estimate.memory.capacity_bytes / 2**30:.0f} GiB: it may not fit"
        )
    if _is_faster(estimate, winner) and (
        needs := complexity_features(estimate.strategy) - complexity_features(winner.strategy)
    ):
        return f"within the prediction's error, and needs {' and '.join(sorted(needs))}"
    words, theirs, ours = largest_loss(estimate, winner)
    return (
        f"{words}: {theirs:.3g} s against {ours:.3g} s" if theirs > ours else "equal in step time"
    )


def largest_loss(estimate: Estimate, winner: Estimate) -> tuple[str, float, float]:
    """Return the part of the step that costs `estimate` most beside `winner`: its name and the
    seconds of both."""
    part = max(PARTS, key=lambda name: getattr(estimate.time, name) - getattr(winner.time, name))
    words = step_part_name(part, estimate.strategy, winner.strategy)
    return words, getattr(estimate.time, part), getattr(winner.time, part)


def step_part_name(part: str, *strategies: Layout) -> str:
    """Name a part of a step for a sentence about these layouts."""
    return PARTS[part].format(in_layer_collectives_text(*strategies))


def _is_faster(estimate: Estimate, winner: Estimate) -> bool:
    return estimate.time.step_seconds < winner.time.step_seconds


def binding_constraint(winner: Estimate, fastest_over_memory: Estimate | None) -> str:
    """Say in one sentence what binds: memory, where a layout that does not fit would be faster;
    else the largest part of the step. fastest_over_memory: from the search."""
    step = winner.time.step_seconds
    if fastest_over_memory is not None:
        faster = 1 - fastest_over_memory.time.step_seconds / step
        return (
            f"memory: {fastest_over_memory.strategy.describe()} would take {faster:.0%} less time, "
            f"but needs {_gib(fastest_over_memory)} of "
            f"{winner.memory.capacity_bytes / 2**30:.0f} GiB"
        )
    part = max(PARTS, key=lambda name: getattr(winner.time, name))
    words, share = step_part_name(part, winner.strategy), getattr(winner.time, part) / step
    return (
        f"{words}: {share:.0%} of the step; twice the memory would make it less than "
        f"{MEMORY_BOUND_FROM:.0%} faster"
    )


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.peak_bytes / 2**30:.1f}"
