"""What a placed layout costs: memory, time and the training that they make up."""

from __future__ import annotations

from shardwright.cluster.cluster_types import Cluster
from shardwright.cost.calibrated_costs import measured_over_predicted, scale_time
from shardwright.cost.diloco_costs import with_outer_step
from shardwright.cost.peak_memory import memory_is_accepted
from shardwright.cost.prediction_errors import prediction_error
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import estimate_time
from shardwright.diagnostics import Diagnostic
from shardwright.layout.axes import AXES
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory, Time, Training

SECONDS_PER_DAY = 86_400


def price(layout: PricedLayout, memory: Memory, diagnostics: tuple[Diagnostic, ...]) -> Estimate:
    """memory: of this layout. diagnostics: what the rules say of it; that it does not fit is
    added."""
    inner = scale_time(
        estimate_time(layout), measured_over_predicted(layout.recipe, layout.graph, layout.strategy)
    )
    time = with_outer_step(inner, layout.recipe, layout.graph)
    if not memory_is_accepted(layout.recipe, memory):
        diagnostics = (
            *diagnostics,
            over_memory_error(memory, layout.strategy, contrastive=layout.graph.contrastive),
        )
    return Estimate(
        strategy=layout.strategy,
        boundaries=layout.boundaries,
        feasible=all(d.severity != "error" for d in diagnostics),
        diagnostics=diagnostics,
        memory=memory,
        time=time,
        training=training_estimate(
            layout.recipe.training.step_count_or_zero,
            layout.cluster,
            time,
            layout.recipe.cluster.islands,
        ),
        error=prediction_error(layout),
        flops_source=layout.shapes.flops_source,
    )


def over_memory_error(memory: Memory, strategy: Layout, *, contrastive: bool = False) -> Diagnostic:
    """contrastive: each rank holds its share of the batch at once, and nothing but data ranks makes
    it smaller."""
    peak_stage = max(memory.stages, key=lambda stage: stage.peak_bytes)
    parts = {
        "parameters": peak_stage.parameters_bytes,
        "gradients": peak_stage.gradients_bytes,
        "optimizer": peak_stage.optimizer_bytes,
        "activations": peak_stage.activations_bytes,
        "workspace": peak_stage.workspace_bytes,
    }
    listed = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in parts.items())
    cuts = ", ".join(axis.name for axis in AXES if axis.cuts and axis.is_auto_by_default)
    ways = (
        f"A higher {cuts} or zero_stage, a smaller micro_batch_size or activation_checkpointing: "
        "full would lower it."
    )
    if contrastive:
        ways = (
            "More GPUs, activation_checkpointing: full or a smaller global_batch_size would "
            "lower it: a rank holds "
        )
        ways += f"its {strategy.micro_batch_size:,} pairs at once."
    return Diagnostic(
        code="SW3201",
        message=f"predicted peak {memory.peak_bytes / 2**30:.1f} GiB does not fit in "
        f"{memory.capacity_bytes / 2**30:.1f} GiB (pipeline rank {peak_stage.stage})",
        help=f"In GiB: {listed}. {ways}",
        key=("parallelism", "micro_batch_size" if strategy.micro_batch_size > 1 else "tensor"),
    )


def training_estimate(steps: int, cluster: Cluster, time: Time, islands: int = 1) -> Training:
    """cluster: of one island."""
    seconds = steps * time.step_seconds
    gpu_hours = seconds / 3600 * cluster.world_size * islands
    price_per_hour = cluster.price_per_gpu_hour
    return Training(
        steps=steps,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost=None if price_per_hour is None else gpu_hours * price_per_hour,
    )
