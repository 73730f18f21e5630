"""One layout -> Estimate: memory, time, and the rules that forbid it."""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.constants import Constants, default_constants
from shardwright.cost.hpz import is_faster, with_hpz
from shardwright.cost.layout import Layout
from shardwright.cost.measured import prediction_error
from shardwright.cost.memory import estimate_memory, logits_are_peak
from shardwright.cost.placement import make_layout
from shardwright.cost.timing import estimate_time
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.table import ENGINES
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import Estimate, Memory, Time, Training
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy
from shardwright.model.chunked import proved_chunked
from shardwright.rules.registry import check_layout, is_countable

SECONDS_PER_DAY = 86_400


def estimate_strategy(recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> Estimate:
    """Numbers for any layout whose world and batch work out; rules and memory decide `feasible`.

    Raises Refusal (SW3101, SW3102, SW3115 and every other broken rule) where they do not, and for axes that the cost
    model does not know: there is nothing to count.
    """
    diagnostics = check_layout(Problem(recipe=recipe, graph=graph, cluster=cluster), strategy)
    if not is_countable(strategy, diagnostics):
        raise Refusal(*diagnostics)
    return price(recipe, graph, cluster, strategy, diagnostics)


def price(
    recipe: Recipe,
    graph: ModelGraph,
    cluster: Cluster,
    strategy: Strategy,
    diagnostics: tuple[Diagnostic, ...],
    constants: Constants | None = None,
) -> Estimate:
    """As estimate_strategy, for a caller that has checked the rules already, or that varies the constants."""
    layout, memory = weigh(recipe, graph, cluster, strategy, constants)
    return price_layout(layout, memory, diagnostics)


def weigh(
    recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy, constants: Constants | None = None
) -> tuple[Layout, Memory]:
    """The cheap half of a price: a search asks no more of what does not fit. Settles `loss: auto` and hpZ, which follow
    from the layout: its strategy says how."""
    constants = constants or default_constants()
    layout = make_layout(recipe, graph, cluster, strategy, constants)
    memory = estimate_memory(layout)
    if not _may_chunk(recipe, graph, strategy, memory) or not logits_are_peak(layout):
        return _settle_hpz(layout, memory)
    chunked = make_layout(recipe, graph, cluster, replace(strategy, loss="chunked"), constants)
    lower = estimate_memory(chunked)
    return _settle_hpz(chunked, lower) if lower.peak_bytes < memory.peak_bytes else (layout, memory)


def _settle_hpz(layout: Layout, memory: Memory) -> tuple[Layout, Memory]:
    """With the second copy of the weights where that is shorter in time and leaves the room that predictions may fall
    short by (decision 019). A strategy that comes with one keeps it. memory: of this layout."""
    if not memory.fits or layout.recipe.objective == "memory" or layout.strategy.hpz_partition_size > 1:
        return layout, memory
    copied = with_hpz(layout)
    if copied is None or not is_faster(copied, than=layout):
        return layout, memory
    more = estimate_memory(copied)
    return (copied, more) if more.fits and _has_room(layout.recipe, more) else (layout, memory)


def _may_chunk(recipe: Recipe, graph: ModelGraph, strategy: Strategy, memory: Memory) -> bool:
    """`loss: auto` makes the head's product once more only for memory that is asked for or needed (decision 018)."""
    own = ENGINES[recipe.target].traits.chunked_loss and recipe.assume.kernels == "auto"
    unsettled = recipe.model.loss == "auto" and strategy.loss == "full"
    wanted = recipe.objective == "memory" or not memory.fits
    return own and unsettled and wanted and proved_chunked(graph.model_type)


def price_layout(layout: Layout, memory: Memory, diagnostics: tuple[Diagnostic, ...]) -> Estimate:
    """diagnostics: what the rules say of it; that it does not fit is added."""
    time = estimate_time(layout)
    if not memory.fits:
        diagnostics = (*diagnostics, does_not_fit(memory, layout.strategy))
    return Estimate(
        strategy=layout.strategy,
        feasible=all(d.severity != "error" for d in diagnostics),
        diagnostics=diagnostics,
        memory=memory,
        time=time,
        training=training_of(layout.recipe.training.known_steps, layout.cluster, time),
        error=prediction_error(layout.recipe, layout.graph, layout.cluster, layout.strategy),
    )


def is_roomy(recipe: Recipe, estimate: Estimate) -> bool:
    """Whether memory_headroom: auto leaves what predictions fall short by; a pinned headroom is in `fits` already."""
    return _has_room(recipe, estimate.memory)


def _has_room(recipe: Recipe, memory: Memory) -> bool:
    if recipe.parallelism.memory_headroom is not None or recipe.assume.ignore_memory:
        return True
    return memory.peak_bytes <= memory.capacity_bytes * (1 - default_constants().memory_headroom)


def does_not_fit(memory: Memory, strategy: Strategy) -> Diagnostic:
    fullest = max(memory.stages, key=lambda stage: stage.peak_bytes)
    parts = {
        "parameters": fullest.parameters_bytes,
        "gradients": fullest.gradients_bytes,
        "optimizer": fullest.optimizer_bytes,
        "activations": fullest.activations_bytes,
        "workspace": fullest.workspace_bytes,
    }
    listed = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in parts.items())
    return Diagnostic(
        code="SW3201",
        message=f"predicted peak {memory.peak_bytes / 2**30:.1f} GiB does not fit in "
        f"{memory.capacity_bytes / 2**30:.1f} GiB (pipeline rank {fullest.stage})",
        help=f"In GiB: {listed}. A higher tensor, pipeline or zero_stage, a smaller micro_batch_size or "
        "activation_checkpointing: full would lower it.",
        key=("parallelism", "micro_batch_size" if strategy.micro_batch_size > 1 else "tensor"),
    )


def training_of(steps: int, cluster: Cluster, time: Time) -> Training:
    seconds = steps * time.step_seconds
    gpu_hours = seconds / 3600 * cluster.world_size
    price_per_hour = cluster.price_per_gpu_hour
    return Training(
        steps=steps,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost=None if price_per_hour is None else gpu_hours * price_per_hour,
    )
