"""What follows from a strategy and is not searched for: its layers' stages, `loss: auto`, and hpZ.

hpZ (ZeRO++, arXiv 2306.10209, section 3.2): a second copy of ZeRO-3's weights, shared out inside
each node, so that they are gathered without the links between nodes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.calibrated_costs import calibrated_constants
from shardwright.cost.collective_seconds import group_of
from shardwright.cost.cost_constants import Constants
from shardwright.cost.layout_costs import price
from shardwright.cost.peak_memory import (
    bytes_with_headroom,
    estimate_memory,
    logits_are_peak,
    memory_is_accepted,
)
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.cost.stage_costs import StageCosts
from shardwright.cost.step_time import data_parallel_seconds
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.layout.zero_hpz_key import disables_hpz
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_support import supports_chunked_loss
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.rule_registry import can_be_priced, check_layout
from shardwright.search.stage_assignment import assign_stages


def estimate_layout(problem: Problem, strategy: Layout) -> Estimate:
    """Numbers for any layout whose world and batch work out; rules and memory decide `feasible`.

    Raises Refusal (SW3101, SW3102, SW3115 and every other broken rule) where they do not, and for
    axes that the cost model does not know: there is nothing to count.
    """
    return estimate_checked_layout(problem, strategy, _checked(problem, strategy))


def price_planned_layout(
    problem: Problem, strategy: Layout, boundaries: tuple[int, ...]
) -> tuple[PricedLayout, Estimate]:
    """What a plan has decided, priced by this version: nothing is settled or placed anew. Raises as
    estimate_layout."""
    diagnostics = _checked(problem, strategy)
    layout = with_boundaries(
        build_priced_layout(problem, strategy, calibrated_constants(problem.recipe)), boundaries
    )
    return layout, price(layout, estimate_memory(layout), diagnostics)


def _checked(problem: Problem, strategy: Layout) -> tuple[Diagnostic, ...]:
    diagnostics = check_layout(problem, strategy)
    if not can_be_priced(strategy, diagnostics):
        raise Refusal(*diagnostics)
    return diagnostics


def estimate_checked_layout(
    problem: Problem,
    strategy: Layout,
    diagnostics: tuple[Diagnostic, ...],
    constants: Constants | None = None,
) -> Estimate:
    """As estimate_layout, for a caller that has checked the rules already, or that varies the
    constants."""
    layout, memory = resolve_layout(problem, strategy, constants)
    return price(layout, memory, diagnostics)


def resolve_layout(
    problem: Problem, strategy: Layout, constants: Constants | None = None
) -> tuple[PricedLayout, Memory]:
    """The layout, whose strategy says how all is settled, and its memory: the cheap half of a
    price. A search asks no more of what does not fit."""
    recipe, graph = problem.recipe, problem.graph
    layout = with_stages_assigned(problem, strategy, constants)
    memory = estimate_memory(layout)
    if not _may_chunk(recipe, graph, strategy, memory) or not logits_are_peak(layout):
        return _resolve_hpz(layout, memory)
    chunked = with_stages_assigned(problem, replace(strategy, loss="chunked"), constants)
    lower = estimate_memory(chunked)
    return (
        _resolve_hpz(chunked, lower) if lower.peak_bytes < memory.peak_bytes else (layout, memory)
    )


def with_stages_assigned(
    problem: Problem, strategy: Layout, constants: Constants | None = None
) -> PricedLayout:
    """The strategy as it is, with its layers on stages."""
    recipe, graph = problem.recipe, problem.graph
    layout = build_priced_layout(
        problem, strategy, constants or calibrated_constants(problem.recipe)
    )
    return with_boundaries(layout, assign_stages(recipe, graph, strategy, StageCosts(layout)))


def _may_chunk(recipe: Recipe, graph: ModelGraph, strategy: Layout, memory: Memory) -> bool:
    """`loss: auto` makes the head's product once more only for memory that is asked for or needed
    (decision 018)."""
    own = ENGINES[recipe.target].traits.chunked_loss and recipe.is_own_run
    unsettled = recipe.model.loss == "auto" and strategy.loss == "full"
    wanted = recipe.objective == "memory" or not memory_is_accepted(recipe, memory)
    return (
        own
        and unsettled
        and wanted
        and supports_chunked_loss(graph.model_type)
        and not graph.is_vision_language
    )


def _resolve_hpz(layout: PricedLayout, memory: Memory) -> tuple[PricedLayout, Memory]:
    """With the second copy of the weights where that is shorter in time and leaves the room that
    predictions may fall short by (decision 019). A strategy that comes with one keeps it. memory:
    of this layout."""
    if (
        not memory_is_accepted(layout.recipe, memory)
        or layout.recipe.objective == "memory"
        or layout.strategy.hpz_partition_size > 1
    ):
        return layout, memory
    copied = with_hpz(layout)
    # The copy changes the data-parallel collectives and nothing else of a step.
    if copied is None or data_parallel_seconds(copied) >= data_parallel_seconds(layout):
        return layout, memory
    more = estimate_memory(copied)
    return (
        (copied, more)
        if memory_is_accepted(layout.recipe, more) and keeps_headroom(layout.recipe, more)
        else (layout, memory)
    )


def with_hpz(layout: PricedLayout) -> PricedLayout | None:
    """The same layout with the second copy; None where the recipe wants none, where no data group
    has several ranks on each of several nodes, and where DeepSpeed cannot: below ZeRO-3, and under
    offload (the loss freezes, DeepSpeed#6926). Beside context ranks it is not tried."""
    s, recipe = layout.strategy, layout.recipe
    own = (
        ENGINES[recipe.target].traits.hpz
        and recipe.assume.kernels == "auto"
        and not disables_hpz(recipe.extra)
    )
    if (
        not own
        or s.zero_stage != 3
        or s.pipeline > 1
        or s.context > 1
        or s.expert > 1
        or s.offload != "none"
    ):
        return None
    group = group_of(layout.cluster, s.shards, s.tensor)
    if not 1 < group.ranks_per_node < group.ranks or group.ranks % group.ranks_per_node:
        return None
    return replace(layout, strategy=replace(s, hpz_partition_size=group.ranks_per_node))


def without_hpz(layout: PricedLayout) -> PricedLayout:
    return replace(layout, strategy=replace(layout.strategy, hpz_partition_size=1))


def keeps_headroom(recipe: Recipe, memory: Memory) -> bool:
    """Whether memory_headroom: auto leaves what predictions fall short by; a pinned headroom is in
    `fits` already."""
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return True
    return memory.peak_bytes <= bytes_with_headroom(memory.capacity_bytes)
