"""Where each byte and each second of a layout goes, finer than `Estimate`, from the same functions:
what it says adds up to what the estimate says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from shardwright.cost.calibrated_costs import measured_over_predicted, scale_time
from shardwright.cost.communication_bytes import StepTraffic, step_traffic
from shardwright.cost.data_parallel_times import data_comm_seconds
from shardwright.cost.diloco_costs import inner_step_seconds
from shardwright.cost.layer_times import layer_seconds
from shardwright.cost.micro_batch_times import partial_recompute_seconds, pass_times
from shardwright.cost.offload_times import host_transfer_seconds
from shardwright.cost.peak_memory import RankMemoryModel, framework_bytes
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import (
    StageSeconds,
    optimizer_seconds,
    schedule_seconds,
    stage_seconds,
)
from shardwright.layout.layout_estimate import Estimate, StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeBreakdown:
    """Seconds of one optimizer step, exposed time only; the sum is the step.

    recompute: what activation checkpointing and a chunked loss run again. accumulate: adding each
    micro-batch's gradients up. host: what a micro-batch costs beyond its layers. tensor_forward,
    tensor_backward: collectives that layers wait for, of tensor, context and expert ranks. idle:
    the pipeline's bubble, and on a rank that is not the slowest one its waiting. outer_comm: a
    step's share of the outer step between islands.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    accumulate_seconds: float
    host_seconds: float
    tensor_forward_seconds: float
    tensor_backward_seconds: float
    pipeline_comm_seconds: float
    data_comm_seconds: float
    optimizer_seconds: float
    idle_seconds: float
    outer_comm_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        seconds: float = sum(getattr(self, field.name) for field in fields(self))
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryBreakdown:
    """Bytes on the fullest device of one pipeline rank; the sum is `StageMemory.peak_bytes`
    (workspace = working + framework + allocator).

    working: short-lived tensors of the backward pass or of the optimizer's step, whichever is more.
    framework: the context and the communicators. allocator: freed blocks that it keeps.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    working_bytes: int
    framework_bytes: int
    allocator_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """One pipeline rank. layers: [start, stop) of graph.layers, two for DualPipeV. in_flight:
    micro-batches whose activations each of them keeps at once. traffic: of one of its devices."""

    pipeline_rank: int
    layers: tuple[tuple[int, int], ...]
    in_flight: tuple[float, ...]
    memory: RankMemoryBreakdown
    time: StepTimeBreakdown
    traffic: StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """step: of the slowest pipeline rank, as `Time` has it. fullest, slowest: pipeline ranks."""

    step: StepTimeBreakdown
    peak_memory_rank: int
    slowest_rank: int
    ranks: tuple[RankBreakdown, ...]


def break_down(layout: PricedLayout, estimate: Estimate) -> Breakdown:
    """estimate: of this layout."""
    s, factor = (
        layout.strategy,
        measured_over_predicted(layout.recipe, layout.graph, layout.strategy),
    )
    outer = estimate.time.outer_comm_seconds
    inner = replace(
        estimate.time, step_seconds=inner_step_seconds(estimate.time), outer_comm_seconds=0.0
    )
    time = scale_time(inner, 1 / factor)
    found = pass_times(layout)
    stages = [stage_seconds(layout, rank, found) for rank in range(s.pipeline)]
    schedule = schedule_seconds(layout, found, stages)
    held, framework = RankMemoryModel(layout), round(framework_bytes(layout))
    ranks = tuple(
        RankBreakdown(
            pipeline_rank=rank,
            layers=tuple((block.start, block.stop) for block in layout.ranks[rank]),
            in_flight=tuple(block.in_flight for block in layout.ranks[rank]),
            memory=_memory(
                held.of(rank, layout.ranks[rank], 0), estimate.memory.stages[rank], framework
            ),
            time=replace(
                _scaled(
                    _rank_parts(layout, time.step_seconds, rank, schedule, stages[rank]), factor
                ),
                outer_comm_seconds=outer,
            ),
            traffic=step_traffic(layout, rank),
        )
        for rank in range(s.pipeline)
    )
    slowest_rank = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    step = _parts(
        layout,
        slowest_rank,
        pipeline_comm=time.pipeline_comm_seconds,
        data_comm=time.data_comm_seconds,
        optimizer=time.optimizer_seconds,
        total=time.step_seconds,
    )
    peak_memory_rank = max(estimate.memory.stages, key=lambda stage: stage.peak_bytes).stage
    whole = replace(_scaled(step, factor), outer_comm_seconds=outer)
    return Breakdown(
        step=whole, peak_memory_rank=peak_memory_rank, slowest_rank=slowest_rank, ranks=ranks
    )


def _memory(live: StageMemory, held: StageMemory, framework: int) -> RankMemoryBreakdown:
    """live: where the allocator has no room to keep anything in."""
    return RankMemoryBreakdown(
        parameters_bytes=held.parameters_bytes,
        gradients_bytes=held.gradients_bytes,
        optimizer_bytes=held.optimizer_bytes,
        activations_bytes=held.activations_bytes,
        working_bytes=live.workspace_bytes - framework,
        framework_bytes=framework,
        allocator_bytes=held.workspace_bytes - live.workspace_bytes,
    )


def _scaled(parts: StepTimeBreakdown, factor: float) -> StepTimeBreakdown:
    """By what runs of this recipe took longer than predicted."""
    return (
        parts
        if factor == 1
        else StepTimeBreakdown(**{f.name: getattr(parts, f.name) * factor for f in fields(parts)})
    )


def _rank_parts(
    layout: PricedLayout, step_seconds: float, rank: int, schedule: float, stage: StageSeconds
) -> StepTimeBreakdown:
    m = layout.strategy.gradient_accumulation_steps
    data_comm = data_comm_seconds(layout, rank, stage.compute)
    if layout.strategy.offload != "none":  # another link, at the same time
        data_comm = max(data_comm, host_transfer_seconds(layout, rank, stage.compute))
    return _parts(
        layout,
        rank,
        pipeline_comm=min(
            m * stage.pipeline_comm, schedule - m * (stage.compute + stage.tensor_comm)
        ),
        data_comm=data_comm,
        optimizer=optimizer_seconds(layout, rank),
        total=step_seconds,
    )


def _parts(
    layout: PricedLayout,
    rank: int,
    *,
    pipeline_comm: float,
    data_comm: float,
    optimizer: float,
    total: float,
) -> StepTimeBreakdown:
    """idle: what is left of the total."""
    s, found, blocks = layout.strategy, pass_times(layout), layout.ranks[rank]
    m = s.gradient_accumulation_steps
    layers = layer_seconds(layout.recipe, layout.graph, layout.cluster.gpu, s, layout.constants)

    def over(sums: tuple[float, ...]) -> float:
        return m * sum(sums[block.stop] - sums[block.start] for block in blocks)

    # What a backward pass runs again on all layers alike, and on those that partial checkpointing
    # picks.
    backward, recompute = (
        over(layers.backward),
        over(layers.recompute) - over(found.partial_recompute_compute),
    )
    partly, partly_comm = partial_recompute_seconds(layout, found, blocks)
    parts = StepTimeBreakdown(
        forward_seconds=over(layers.forward),
        backward_seconds=backward,
        recompute_seconds=recompute + m * partly,
        accumulate_seconds=_no_noise(over(found.backward_compute) - backward - recompute, backward),
        host_seconds=m * found.per_rank_seconds,
        tensor_forward_seconds=over(found.forward_comm),
        tensor_backward_seconds=over(found.backward_comm) + m * partly_comm,
        pipeline_comm_seconds=pipeline_comm,
        data_comm_seconds=data_comm,
        optimizer_seconds=optimizer,
        idle_seconds=0.0,
    )
    return replace(parts, idle_seconds=_no_noise(total - parts.total_seconds, total))


def _no_noise(seconds: float, of_seconds: float) -> float:
    """0 where the difference of two sums is rounding alone."""
    return 0.0 if abs(seconds) < 1e-9 * of_seconds else seconds
