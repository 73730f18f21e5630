"""`activation_checkpointing: auto` between full and none: of the numbers of recomputed layers of a
stage that memory has room for, the fastest.

Not an axis of the search: memory falls with each layer, so the best number of them follows from the
layout.
"""

from __future__ import annotations

import bisect
from dataclasses import replace

from shardwright.cost.peak_memory import bytes_with_headroom, estimate_memory, usable_bytes
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.cost.step_time import estimate_time
from shardwright.layout.axes import axis_named, is_world_pinned
from shardwright.layout.layout_estimate import Memory
from shardwright.layout.planning_problem import Problem
from shardwright.layout.stage_balancing import max_decoder_layers_per_stage
from shardwright.recipe.literal_types import Checkpointing, PartialCheckpointing
from shardwright.search.layout_resolution import keeps_headroom, resolve_layout, without_hpz


def with_partial_checkpointing(
    problem: Problem, layout: PricedLayout, memory: Memory
) -> tuple[PricedLayout, Memory] | None:
    """The layout with fewer layers recomputed, settled as the recipe that pins them would be: as
    few as fit, or as few as pay where a pipeline's layers have to move for it.

    layout: settled, with all layers recomputed. None where it has not, where it does not fit, where
    recomputing none fits too, and where the recipe does not ask for it. What predictions fall short
    by stays free where the layout keeps it free.
    """
    recipe = problem.recipe
    if (
        not allows_partial_checkpointing(problem)
        or layout.strategy.activation_checkpointing != "full"
        or not memory.fits
    ):
        return None
    limit = usable_bytes(layout.problem, layout.constants)
    if recipe.parallelism.memory_headroom is None and keeps_headroom(recipe, memory):
        limit = min(limit, bytes_with_headroom(memory.capacity_bytes))
    # The second copy of the weights takes room that fewer recomputed layers could have.
    bases = [layout, without_hpz(layout)] if layout.strategy.hpz_partition_size > 1 else [layout]
    found = [_settled(problem, base, limit) for base in bases]
    return min(
        (f for f in found if f is not None),
        key=lambda f: estimate_time(f[0]).step_seconds,
        default=None,
    )


def allows_partial_checkpointing(problem: Problem) -> bool:
    """Not where the recipe pins the key or (the rule for `auto`, layout/axes.py) tensor, pipeline
    and data of all GPUs; nor where memory decides nothing, or all."""
    recipe = problem.recipe
    pinned = axis_named("activation_checkpointing").pin(recipe) is not None or is_world_pinned(
        problem
    )
    return not (pinned or recipe.objective == "memory" or recipe.assume.ignore_memory)


def _settled(
    problem: Problem, layout: PricedLayout, limit: int
) -> tuple[PricedLayout, Memory] | None:
    """The layers of a pipeline may come to stand on other stages, where fewer still fit; that can
    make the slowest rank slower than what is no longer recomputed made it faster."""
    s = layout.strategy

    def at(layers: int) -> tuple[PricedLayout, Memory]:
        choice = _choice(layers * s.virtual_stages)  # of a rank
        return resolve_layout(
            problem, replace(s, activation_checkpointing=choice, hpz_partition_size=1)
        )

    fewest = _fewest(layout, limit)
    if not fewest:
        return None
    found = at(fewest)
    if found[1].peak_bytes > limit:
        return None
    while (
        s.pipeline > 1
        and (fewer := at(fewest - 1))[1].peak_bytes <= limit
        and _is_faster(fewer[0], found[0])
    ):
        found, fewest = fewer, fewest - 1
        if not fewest:
            return None
    return found


def _is_faster(layout: PricedLayout, other: PricedLayout) -> bool:
    return estimate_time(layout).step_seconds < estimate_time(other).step_seconds


def _choice(layers: int) -> Checkpointing | PartialCheckpointing:
    return PartialCheckpointing(full=layers) if layers else "none"


def _fewest(layout: PricedLayout, limit: int) -> int:
    """Recomputed layers of each part with which the layout fits, its layers where they are; 0 where
    it fits without, or only with all of them.

    By bisection: memory falls with each layer, but for the last one of a stage, which is made again
    beside its inputs instead of being kept.
    """
    largest = max(layout.decoder_layers(block) for blocks in layout.ranks for block in blocks)
    most = min(largest - 1, max_decoder_layers_per_stage(layout.graph, layout.strategy))

    def fits(layers: int) -> bool:
        strategy = replace(
            layout.strategy,
            activation_checkpointing=_choice(layers * layout.strategy.virtual_stages),
        )
        there = with_boundaries(
            build_priced_layout(layout.problem, strategy, layout.constants), layout.boundaries
        )
        return estimate_memory(there).peak_bytes <= limit

    fewest = bisect.bisect_left(range(most + 1), True, key=fits)
    return fewest if fewest <= most else 0
