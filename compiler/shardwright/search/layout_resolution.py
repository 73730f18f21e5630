"""What follows from a strategy and is not searched for: its layers' stages, `loss: auto`, and hpZ.

hpZ (ZeRO++, arXiv 2306.10209, section 3.2): a second copy of ZeRO-3's weights, shared out inside
each node, so that they are gathered without the links between nodes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.calibrated_costs import constants_of
from shardwright.cost.collective_seconds import group_of
from shardwright.cost.cost_constants import Constants
from shardwright.cost.layout_costs import price
from shardwright.cost.peak_memory import (
    cautious_bytes,
    estimate_memory,
    is_accepted,
    logits_are_peak,
)
from shardwright.cost.priced_layout import Layout, lay_out, placed
from shardwright.cost.stage_costs import PricedStages
from shardwright.cost.step_time import data_seconds
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout import Strategy
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.layout.zero_hpz_key import asks_for_none
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_support import proved_chunked
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.rule_registry import check_layout, is_countable
from shardwright.search.stage_assignment import place_layers


def estimate_strategy(problem: Problem, strategy: Strategy) -> Estimate:
    """Numbers for any layout whose world and batch work out; rules and memory decide `feasible`.

    Raises Refusal (SW3101, SW3102, SW3115 and every other broken rule) where they do not, and for
    axes that the cost model does not know: there is nothing to count.
    """
    return settled_estimate(problem, strategy, _countable(problem, strategy))


def as_planned(
    problem: Problem, strategy: Strategy, boundaries: tuple[int, ...]
) -> tuple[Layout, Estimate]:
    """What a plan has decided, priced by this version: nothing is settled or placed anew. Raises as
    estimate_strategy."""
    diagnostics = _countable(problem, strategy)
    layout = placed(lay_out(problem, strategy, constants_of(problem.recipe)), boundaries)
    return layout, price(layout, estimate_memory(layout), diagnostics)


def _countable(problem: Problem, strategy: Strategy) -> tuple[Diagnostic, ...]:
    diagnostics = check_layout(problem, strategy)
    if not is_countable(strategy, diagnostics):
        raise Refusal(*diagnostics)
    return diagnostics


def settled_estimate(
    problem: Problem,
    strategy: Strategy,
    diagnostics: tuple[Diagnostic, ...],
    constants: Constants | None = None,
) -> Estimate:
    """As estimate_strategy, for a caller that has checked the rules already, or that varies the
    constants."""
    layout, memory = settle(problem, strategy, constants)
    return price(layout, memory, diagnostics)


def settle(
    problem: Problem, strategy: Strategy, constants: Constants | None = None
) -> tuple[Layout, Memory]:
    """The layout, whose strategy says how all is settled, and its memory: the cheap half of a
    price. A search asks no more of what does not fit."""
    recipe, graph = problem.recipe, problem.graph
    layout = place(problem, strategy, constants)
    memory = estimate_memory(layout)
    if not _may_chunk(recipe, graph, strategy, memory) or not logits_are_peak(layout):
        return _settle_hpz(layout, memory)
    chunked = place(problem, replace(strategy, loss="chunked"), constants)
    lower = estimate_memory(chunked)
    return _settle_hpz(chunked, lower) if lower.peak_bytes < memory.peak_bytes else (layout, memory)


def place(problem: Problem, strategy: Strategy, constants: Constants | None = None) -> Layout:
    """The strategy as it is, with its layers on stages."""
    recipe, graph = problem.recipe, problem.graph
    layout = lay_out(problem, strategy, constants or constants_of(problem.recipe))
    return placed(layout, place_layers(recipe, graph, strategy, PricedStages(layout)))


def _may_chunk(recipe: Recipe, graph: ModelGraph, strategy: Strategy, memory: Memory) -> bool:
    """`loss: auto` makes the head's product once more only for memory that is asked for or needed
    (decision 018)."""
    own = ENGINES[recipe.target].traits.chunked_loss and recipe.prices_own_run
    unsettled = recipe.model.loss == "auto" and strategy.loss == "full"
    wanted = recipe.objective == "memory" or not is_accepted(recipe, memory)
    return own and unsettled and wanted and proved_chunked(graph.model_type) and not graph.sees


def _settle_hpz(layout: Layout, memory: Memory) -> tuple[Layout, Memory]:
    """With the second copy of the weights where that is shorter in time and leaves the room that
    predictions may fall short by (decision 019). A strategy that comes with one keeps it. memory:
    of this layout."""
    if (
        not is_accepted(layout.recipe, memory)
        or layout.recipe.objective == "memory"
        or layout.strategy.hpz_partition_size > 1
    ):
        return layout, memory
    copied = with_hpz(layout)
    # The copy changes the data-parallel collectives and nothing else of a step.
    if copied is None or data_seconds(copied) >= data_seconds(layout):
        return layout, memory
    more = estimate_memory(copied)
    return (
        (copied, more)
        if is_accepted(layout.recipe, more) and is_roomy(layout.recipe, more)
        else (layout, memory)
    )


def with_hpz(layout: Layout) -> Layout | None:
    """The same layout with the second copy; None where the recipe wants none, where no data group
    has several ranks on each of several nodes, and where DeepSpeed cannot: below ZeRO-3, and under
    offload (the loss freezes, DeepSpeed#6926). Beside context ranks it is not tried."""
    s, recipe = layout.strategy, layout.recipe
    own = (
        ENGINES[recipe.target].traits.hpz
        and recipe.assume.kernels == "auto"
        and not asks_for_none(recipe.extra)
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


def without_hpz(layout: Layout) -> Layout:
    return replace(layout, strategy=replace(layout.strategy, hpz_partition_size=1))


def is_roomy(recipe: Recipe, memory: Memory) -> bool:
    """Whether memory_headroom: auto leaves what predictions fall short by; a pinned headroom is in
    `fits` already."""
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return True
    return memory.peak_bytes <= cautious_bytes(memory.capacity_bytes)
