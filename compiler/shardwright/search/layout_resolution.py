"""Resolve what follows from a layout and is not searched for: stage boundaries, `loss: auto`, and
hpZ.

hpZ (ZeRO++, arXiv 2306.10209, section 3.2) keeps a second copy of ZeRO-3's weights, sharded
inside each node, so that they are gathered without the links between nodes.
"""

from __future__ import annotations

import bisect
from dataclasses import replace

from shardwright.cost.calibrated_costs import calibrated_constants
from shardwright.cost.collective_seconds import group_of
from shardwright.cost.cost_constants import Constants
from shardwright.cost.layout_costs import StageCosts, price
from shardwright.cost.peak_memory import (
    RankMemoryModel,
    bytes_with_headroom,
    estimate_memory,
    logits_are_peak,
    memory_is_accepted,
    usable_bytes,
)
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.cost.step_time import data_parallel_seconds, estimate_time
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import axis_named, is_world_pinned
from shardwright.layout.layout import Candidate, Layout
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.layout.stage_balancing import max_decoder_layers_per_stage
from shardwright.layout.zero_settings import disables_hpz
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_support import supports_chunked_loss
from shardwright.recipe.literal_types import (
    Checkpointing,
    LayerCheckpointing,
    PartialCheckpointing,
    RecomputedModules,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.rule_registry import can_be_priced, check_layout
from shardwright.search.stage_assignment import assign_stages


def estimate_layout(problem: Problem, strategy: Layout) -> Estimate:
    """Estimate any layout whose degrees multiply to the world size and the batch; rules and memory
    decide `feasible`.

    Raises Refusal (SW3101, SW3102, SW3115 and every other broken rule) where they do not
    multiply out, and for axes without a cost model.
    """
    return estimate_checked_layout(problem, strategy, _checked(problem, strategy))


def price_planned_layout(
    problem: Problem, strategy: Layout, boundaries: tuple[int, ...]
) -> tuple[PricedLayout, Estimate]:
    """Price a plan's layout and boundaries with this version's cost model; nothing is resolved
    again. Raises what estimate_layout raises."""
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
    """Estimate a layout whose rules are checked already, or with other constants."""
    layout, memory = resolve_layout(problem, strategy, constants)
    return price(layout, memory, diagnostics)


def resolve_layout(
    problem: Problem, strategy: Layout, constants: Constants | None = None
) -> tuple[PricedLayout, Memory]:
    """Return the layout with everything that follows from it resolved, and its memory: the cheap
    half of a price. A search does no more for a layout that does not fit."""
    recipe, graph = problem.recipe, problem.graph
    layout, ranks = _with_rank_memory(problem, strategy, constants)
    memory = estimate_memory(layout, ranks)
    if not _may_chunk(recipe, graph, strategy, memory) or not logits_are_peak(layout, ranks):
        return _resolve_hpz(layout, memory)
    chunked, ranks = _with_rank_memory(problem, replace(strategy, loss="chunked"), constants)
    lower = estimate_memory(chunked, ranks)
    return (
        _resolve_hpz(chunked, lower) if lower.peak_bytes < memory.peak_bytes else (layout, memory)
    )


def with_stages_assigned(
    problem: Problem, strategy: Layout, constants: Constants | None = None
) -> PricedLayout:
    """Return the strategy as it is, with its layers on stages."""
    return _with_rank_memory(problem, strategy, constants)[0]


def _with_rank_memory(
    problem: Problem, strategy: Layout, constants: Constants | None
) -> tuple[PricedLayout, RankMemoryModel]:
    recipe, graph = problem.recipe, problem.graph
    layout = build_priced_layout(
        problem, strategy, constants or calibrated_constants(problem.recipe)
    )
    prices = StageCosts(layout)
    boundaries = assign_stages(recipe, graph, strategy, prices)
    return with_boundaries(layout, boundaries), prices.rank_memory


def _may_chunk(recipe: Recipe, graph: ModelGraph, strategy: Layout, memory: Memory) -> bool:
    """Return whether `loss: auto` may chunk the loss: only for memory that is needed, or is the
    objective, since it recomputes the head's product (decision 018)."""
    own = ENGINES[recipe.target].traits.chunked_loss and recipe.is_own_run
    unsettled = recipe.model.loss == "auto" and strategy.loss == "full"
    wanted = recipe.objective == "memory" or not memory_is_accepted(recipe, memory)
    return (
        own
        and unsettled
        and wanted
        and supports_chunked_loss(graph.model_type)
        and graph.task_traits.chunked_loss
    )


def _resolve_hpz(layout: PricedLayout, memory: Memory) -> tuple[PricedLayout, Memory]:
    """Add hpZ's second copy of the weights where it makes the step shorter and keeps the memory
    headroom free (decision 019). A layout that comes with hpZ keeps it. memory: of this layout."""
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
    """Return the same layout with hpZ's copy; None where hpZ cannot run.

    It cannot where the recipe disables it, where no data group has several ranks on each of
    several nodes, below ZeRO-3, and under offload (the loss freezes, DeepSpeed#6926). Beside
    context parallelism it is not tried.
    """
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
    group = group_of(layout.cluster, s.zero_world_size, s.tensor)
    if not 1 < group.ranks_per_node < group.ranks or group.ranks % group.ranks_per_node:
        return None
    return replace(layout, strategy=replace(s, hpz_partition_size=group.ranks_per_node))


def without_hpz(layout: PricedLayout) -> PricedLayout:
    return replace(layout, strategy=replace(layout.strategy, hpz_partition_size=1))


def keeps_headroom(recipe: Recipe, memory: Memory) -> bool:
    """Return whether `memory_headroom: auto` keeps the model's prediction error free; a pinned
    headroom is in `fits` already."""
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return True
    return memory.peak_bytes <= bytes_with_headroom(memory.capacity_bytes)


# `activation_checkpointing: auto` between full and none: of the numbers of recomputed layers of a
# stage that memory has room for, the fastest.
#
# Not an axis of the search: memory falls with each layer, so the best number of them follows from
# the
# layout.


def with_partial_checkpointing(
    problem: Problem, layout: PricedLayout, memory: Memory
) -> tuple[PricedLayout, Memory] | None:
    """Return the layout with fewer layers recomputed, resolved as a recipe that pins them would be:
    as few as fit, or as few as pay where a pipeline's layers have to move for it.

    layout: resolved, with all layers recomputed. None where it recomputes fewer already, does
    not fit, or fits with none recomputed, and where the recipe does not ask for it. The
    prediction's error stays free where the layout keeps it free.
    """
    if (
        not allows_partial_checkpointing(problem)
        or layout.strategy.activation_checkpointing != "full"
        or not memory.fits
    ):
        return None
    limit = _memory_limit(layout, memory)
    # The second copy of the weights takes room that fewer recomputed layers could have.
    bases = [layout, without_hpz(layout)] if layout.strategy.hpz_partition_size > 1 else [layout]
    found = [_fastest_partial_checkpointing(problem, base, limit) for base in bases]
    return min(
        (f for f in found if f is not None),
        key=lambda f: estimate_time(f[0]).step_seconds,
        default=None,
    )


# Lists of modules that Megatron-Core's published runs recompute, the cheapest first: outputs that
# are discarded, and feed-forward networks whole (Megatron-LM's MoE README; the DeepSeek-V3 runs of
# Megatron-Bridge's performance summary). A model has the part of a list that its layers have.
_MODULE_LISTS: tuple[RecomputedModules, ...] = (
    ("mla_up_proj", "moe_act"),
    ("layernorm", "mla_up_proj", "moe_act"),
    ("mlp", "moe"),
)


def searched_modules(problem: Problem, s: Layout) -> tuple[RecomputedModules, ...]:
    """Return the lists of modules that stand beside a layout that recomputes all layers, the ones
    that recompute least first."""
    obstacle = ENGINES[problem.recipe.target].recompute_obstacle
    if obstacle is None or not allows_partial_checkpointing(problem):
        return ()
    x = Candidate(recipe=problem.recipe, graph=problem.graph, cluster=problem.cluster, strategy=s)
    every = dict.fromkeys(module for modules in _MODULE_LISTS for module in modules)
    has = {module for module in every if not obstacle(x, module)}
    lists = (tuple(module for module in modules if module in has) for modules in _MODULE_LISTS)
    # Norms alone save too little to be worth a candidate.
    return tuple(dict.fromkeys(each for each in lists if each and each != ("layernorm",)))


def with_module_checkpointing(
    problem: Problem, layout: PricedLayout, memory: Memory
) -> tuple[PricedLayout, Memory] | None:
    """Return the layout with the first of searched_modules recomputed that fits, resolved.

    layout: resolved, with all layers recomputed. None where it recomputes less already, does not
    fit, or fits with nothing recomputed, and where no list fits.
    """
    if layout.strategy.activation_checkpointing != "full" or not memory.fits:
        return None
    lists = searched_modules(problem, layout.strategy)
    limit = _memory_limit(layout, memory) if lists else 0

    def fits(choice: LayerCheckpointing) -> bool:
        strategy = replace(layout.strategy, activation_checkpointing=choice)
        there = build_priced_layout(layout.problem, strategy, layout.constants)
        return estimate_memory(with_boundaries(there, layout.boundaries)).peak_bytes <= limit

    fitting = next((modules for modules in lists if fits(modules)), None)
    if fitting is None or fits("none"):
        return None
    found = resolve_layout(
        problem, replace(layout.strategy, activation_checkpointing=fitting, hpz_partition_size=1)
    )
    return found if found[1].peak_bytes <= limit else None


def _memory_limit(layout: PricedLayout, memory: Memory) -> int:
    """Return the bytes that a layout with less recomputation may take: the prediction's error stays
    free where the layout keeps it free."""
    limit = usable_bytes(layout.problem, layout.constants)
    pinned = layout.recipe.parallelism.memory_headroom is not None
    if not pinned and keeps_headroom(layout.recipe, memory):
        limit = min(limit, bytes_with_headroom(memory.capacity_bytes))
    return limit


def allows_partial_checkpointing(problem: Problem) -> bool:
    """Return whether partial checkpointing may be chosen: not where the recipe pins the key, or
    tensor, pipeline and data of all GPUs, nor where memory decides nothing, or everything."""
    recipe = problem.recipe
    pinned = axis_named("activation_checkpointing").pin(recipe) is not None or is_world_pinned(
        problem
    )
    return not (pinned or recipe.objective == "memory" or recipe.assume.ignore_memory)


def _fastest_partial_checkpointing(
    problem: Problem, layout: PricedLayout, limit: int
) -> tuple[PricedLayout, Memory] | None:
    """Find the fastest number of recomputed layers. With fewer of them, a pipeline's layers may
    move to other stages; that can make the slowest rank slower than the saved recomputation made
    it faster."""
    s = layout.strategy

    def at(layers: int) -> tuple[PricedLayout, Memory]:
        choice = _checkpointing_of(layers * s.virtual_stages)  # of a rank
        return resolve_layout(
            problem, replace(s, activation_checkpointing=choice, hpz_partition_size=1)
        )

    fewest = _fewest_recomputed_layers(layout, limit)
    if not fewest:
        return None
    found = at(fewest)
    if found[1].peak_bytes > limit:
        return None
    while (
        s.pipeline > 1
        and (fewer := at(fewest - 1))[1].peak_bytes <= limit
        and estimate_time(fewer[0]).step_seconds < estimate_time(found[0]).step_seconds
    ):
        found, fewest = fewer, fewest - 1
        if not fewest:
            return None
    return found


def _checkpointing_of(layers: int) -> Checkpointing | PartialCheckpointing:
    return PartialCheckpointing(full=layers) if layers else "none"


def _fewest_recomputed_layers(layout: PricedLayout, limit: int) -> int:
    """Return the fewest recomputed layers of each part with which the layout fits at its
    boundaries; 0 where it fits with none, or only with all.

    Bisects: memory falls with each layer, but for the last one of a stage, which is recomputed
    beside its inputs instead of being saved.
    """
    largest = max(layout.decoder_layers(block) for blocks in layout.ranks for block in blocks)
    most = min(largest - 1, max_decoder_layers_per_stage(layout.graph, layout.strategy))

    def fits(layers: int) -> bool:
        strategy = replace(
            layout.strategy,
            activation_checkpointing=_checkpointing_of(layers * layout.strategy.virtual_stages),
        )
        there = with_boundaries(
            build_priced_layout(layout.problem, strategy, layout.constants), layout.boundaries
        )
        return estimate_memory(there).peak_bytes <= limit

    fewest = bisect.bisect_left(range(most + 1), True, key=fits)
    return fewest if fewest <= most else 0
