"""Cost a layout whose layers are assigned to stages: memory, time and the whole training."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields, replace

from shardwright.cost.calibrated_costs import measured_over_predicted, scale_time
from shardwright.cost.communication_bytes import StepTraffic, step_traffic
from shardwright.cost.diloco_costs import inner_step_seconds, with_outer_step
from shardwright.cost.layer_times import (
    FORWARD_SHARE,
    PassTimes,
    layer_seconds,
    partial_recompute_seconds,
    pass_times,
)
from shardwright.cost.peak_memory import (
    RankMemoryModel,
    bytes_with_headroom,
    framework_bytes,
    memory_is_accepted,
    model_state_bytes,
    usable_bytes,
)
from shardwright.cost.prediction_errors import prediction_error
from shardwright.cost.priced_layout import ModelChunk, PricedLayout, in_flight
from shardwright.cost.step_time import (
    StageSeconds,
    data_comm_seconds,
    estimate_time,
    host_transfer_seconds,
    optimizer_seconds,
    per_step_seconds_per_parameter,
    schedule_seconds,
    stage_seconds,
)
from shardwright.diagnostics import Diagnostic
from shardwright.layout.axes import AXES
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory, StageMemory, Time, Training
from shardwright.recipe.literal_types import PartialCheckpointing

# Costs of candidate stages, before layers are assigned to them.


class StageCosts:
    """Cost any run of layers as a stage; each property is computed on first use.

    forward_seconds, backward_seconds: one micro-batch, collectives included, prefix sums over
        graph.layers
    once_per_step_seconds: once a step, prefix sums over graph.layers
    per_stage_seconds: forward and backward seconds of a stage beyond its layers
    """

    def __init__(self, priced: PricedLayout) -> None:
        self._priced = priced

    @functools.cached_property
    def forward_seconds(self) -> tuple[float, ...]:
        return tuple(map(operator.add, self._passes.forward_compute, self._passes.forward_comm))

    @functools.cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        return tuple(map(operator.add, self._passes.backward_compute, self._passes.backward_comm))

    @functools.cached_property
    def once_per_step_seconds(self) -> tuple[float, ...]:
        each = per_step_seconds_per_parameter(self._priced)
        return tuple([each * numel for numel in self._priced.shapes.numel])

    @property
    def per_stage_seconds(self) -> tuple[float, float]:
        s, seconds = self._priced.strategy, self._passes.per_rank_seconds
        stages_a_rank = s.stages // s.pipeline
        backward = seconds * (1 - FORWARD_SHARE) / stages_a_rank
        return seconds * FORWARD_SHARE / stages_a_rank, backward + self._partial_recompute_seconds

    @property
    def _partial_recompute_seconds(self) -> float:
        """Return what partial checkpointing adds to a stage, for the same number of mean layers
        on each."""
        choice, found = self._priced.strategy.activation_checkpointing, self._passes
        if not isinstance(choice, PartialCheckpointing):
            return 0.0
        return (
            choice.full
            * (found.partial_recompute_compute[-1] + found.partial_recompute_comm[-1])
            / self._priced.graph.decoder_layers
        )

    @property
    def send_seconds(self) -> float:
        return self._passes.send_seconds

    @functools.cached_property
    def usable_bytes(self) -> int:
        return usable_bytes(self._priced.problem, self._priced.constants)

    @property
    def bytes_with_headroom(self) -> int:
        return bytes_with_headroom(self._priced.cluster.capacity_bytes)

    @property
    def least_bytes(self) -> float:
        """Return the model states alone, spread evenly: no stage assignment has a lower peak."""
        priced = self._priced
        numel = priced.shapes.numel[-1] - priced.shapes.shared_numel
        experts = priced.shapes.expert_numel[-1] if priced.strategy.shards_experts else 0
        matrices = priced.matrices[-1] if priced.matrices else 0
        states = model_state_bytes(priced, numel, experts=experts, matrices=matrices)
        return sum(states) / priced.strategy.pipeline

    def held(self, start: int, stop: int) -> tuple[float, float]:
        numel = self._priced.shapes.numel
        return numel[stop] - numel[start], self.rank_memory.saved_activation_bytes(start, stop)

    def peak_bytes(self, rank: int, bounds: tuple[int, ...]) -> int:
        """Return the peak of a pipeline rank with these layers.

        bounds: start and stop of each of its stages
        """
        blocks = tuple(map(ModelChunk, bounds[::2], bounds[1::2], self._in_flight[rank]))
        return self.rank_memory.peak_bytes(blocks, self.usable_bytes)

    @functools.cached_property
    def _passes(self) -> PassTimes:
        return pass_times(self._priced)

    @functools.cached_property
    def rank_memory(self) -> RankMemoryModel:
        return RankMemoryModel(self._priced)

    @functools.cached_property
    def _in_flight(self) -> list[tuple[float, ...]]:
        return [
            in_flight(self._priced.strategy, rank) for rank in range(self._priced.strategy.pipeline)
        ]


SECONDS_PER_DAY = 86_400


def price(priced: PricedLayout, memory: Memory, diagnostics: tuple[Diagnostic, ...]) -> Estimate:
    """Estimate a layout.

    memory: of this layout
    diagnostics: the rules' results; one is added where the layout does not fit
    """
    inner = scale_time(
        estimate_time(priced), measured_over_predicted(priced.recipe, priced.graph, priced.strategy)
    )
    time = with_outer_step(inner, priced.recipe, priced.graph)
    if not memory_is_accepted(priced.recipe, memory):
        diagnostics = (
            *diagnostics,
            over_memory_error(
                memory,
                priced.strategy,
                compares_pairs=priced.graph.task_traits.compares_pairs,
            ),
        )
    return Estimate(
        strategy=priced.strategy,
        boundaries=priced.boundaries,
        feasible=all(d.severity != "error" for d in diagnostics),
        diagnostics=diagnostics,
        memory=memory,
        time=time,
        training=training_estimate(
            priced.recipe.training.step_count_or_zero,
            priced.cluster,
            time,
            priced.recipe.cluster.islands,
        ),
        error=prediction_error(priced),
        flops_source=priced.shapes.flops_source,
    )


def over_memory_error(
    memory: Memory, strategy: Layout, *, compares_pairs: bool = False
) -> Diagnostic:
    """Return SW3201. Where the loss compares pairs, each rank holds its share of the batch at once,
    and nothing but data ranks makes it smaller."""
    peak_stage = max(memory.stages, key=lambda stage: stage.peak_bytes)
    parts = {
        "parameters": peak_stage.parameters_bytes,
        "gradients": peak_stage.gradients_bytes,
        "optimizer": peak_stage.optimizer_bytes,
        "activations": peak_stage.activations_bytes,
        "workspace": peak_stage.workspace_bytes,
    }
    listed = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in parts.items())
    cuts = ", ".join(
        axis.name for axis in AXES if axis.is_model_parallel and axis.is_auto_by_default
    )
    ways = (
        f"Use a higher {cuts} or zero_stage, a smaller micro_batch_size or "
        "activation_checkpointing: full."
    )
    if compares_pairs:
        ways = (
            "Use more GPUs, activation_checkpointing: full or a smaller global_batch_size: each "
            "rank holds "
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
    """Estimate the whole training; cluster: of one island."""
    seconds = steps * time.step_seconds
    gpu_hours = seconds / 3600 * cluster.world_size * islands
    price_per_hour = cluster.price_per_gpu_hour
    return Training(
        steps=steps,
        days=seconds / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost=None if price_per_hour is None else gpu_hours * price_per_hour,
    )


# Breakdown of an Estimate into parts that add up to it, computed by the same functions.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeBreakdown:
    """Split one optimizer step into exposed seconds, which add up to the step.

    recompute_seconds: repeated by activation checkpointing and a chunked loss
    accumulate_seconds: adding up each micro-batch's gradients
    host_seconds: a micro-batch's cost beyond its layers
    tensor_forward_seconds, tensor_backward_seconds: collectives that layers wait for, of tensor,
        context and expert ranks
    idle_seconds: the pipeline's bubble, and the waiting of a rank that is not the slowest
    outer_comm_seconds: a step's share of DiLoCo's outer step
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

    def scoring_seconds(self, zero_stage: int, forwards: int = 1) -> float:
        """Return the seconds of the forward passes over a step's sequences, which score them.

        A backward pass sends as much as a forward pass and takes two forward passes' share of a
        micro-batch's overhead. So it does of the traffic over data ranks, which gathers parameters
        at ZeRO-3. The pipeline idles in proportion.

        forwards: of a step, those without a backward pass included
        """
        shared = self.host_seconds + (self.data_comm_seconds if zero_stage == 3 else 0.0)
        forward = self.forward_seconds + self.tensor_forward_seconds
        forward += self.pipeline_comm_seconds * forwards / (forwards + 1)
        forward += shared * forwards / (forwards + 2)
        working = self.total_seconds - self.idle_seconds - self.optimizer_seconds
        working -= self.outer_comm_seconds
        return forward * (1 + self.idle_seconds / working) if working > 0 else forward


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryBreakdown:
    """Split the bytes of a pipeline rank's peak-memory device, which add up to
    StageMemory.peak_bytes.

    working_bytes: short-lived tensors of the backward pass or of the optimizer's step, whichever is
        more
    framework_bytes: the CUDA context and the communicators
    allocator_bytes: freed blocks that the allocator keeps

    StageMemory.workspace_bytes is working + framework + allocator.
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
    """Break down one pipeline rank.

    layers: [start, stop) of graph.layers, two for DualPipeV
    in_flight: micro-batches whose activations each of these stages saves at once
    traffic: of one of its devices
    """

    pipeline_rank: int
    layers: tuple[tuple[int, int], ...]
    in_flight: tuple[float, ...]
    memory: RankMemoryBreakdown
    time: StepTimeBreakdown
    traffic: StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Break down every pipeline rank.

    step: of the slowest pipeline rank, as in `Time`
    peak_memory_rank, slowest_rank: pipeline ranks
    """

    step: StepTimeBreakdown
    peak_memory_rank: int
    slowest_rank: int
    ranks: tuple[RankBreakdown, ...]


def break_down(priced: PricedLayout, estimate: Estimate) -> Breakdown:
    """Break down the estimate of this layout."""
    s, factor = (
        priced.strategy,
        measured_over_predicted(priced.recipe, priced.graph, priced.strategy),
    )
    outer = estimate.time.outer_comm_seconds
    inner = replace(
        estimate.time, step_seconds=inner_step_seconds(estimate.time), outer_comm_seconds=0.0
    )
    time = scale_time(inner, 1 / factor)
    found = pass_times(priced)
    stages = [stage_seconds(priced, rank, found) for rank in range(s.pipeline)]
    schedule = schedule_seconds(priced, found, stages)
    held, framework = RankMemoryModel(priced), round(framework_bytes(priced))
    ranks = tuple(
        RankBreakdown(
            pipeline_rank=rank,
            layers=tuple((block.start, block.stop) for block in priced.ranks[rank]),
            in_flight=tuple(block.in_flight for block in priced.ranks[rank]),
            memory=_memory(
                held.of(rank, priced.ranks[rank], 0), estimate.memory.stages[rank], framework
            ),
            time=replace(
                _scaled(
                    _rank_parts(priced, time.step_seconds, rank, schedule, stages[rank]), factor
                ),
                outer_comm_seconds=outer,
            ),
            traffic=step_traffic(priced, rank),
        )
        for rank in range(s.pipeline)
    )
    slowest_rank = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    step = _parts(
        priced,
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
    """Split a rank's memory.

    live: with an allocator that has no room to keep freed blocks
    """
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
    """Scale by the measured over predicted time of this recipe's runs."""
    return (
        parts
        if factor == 1
        else StepTimeBreakdown(**{f.name: getattr(parts, f.name) * factor for f in fields(parts)})
    )


def _rank_parts(
    priced: PricedLayout, step_seconds: float, rank: int, schedule: float, stage: StageSeconds
) -> StepTimeBreakdown:
    m = priced.strategy.gradient_accumulation_steps
    data_comm = data_comm_seconds(priced, rank, stage)
    if priced.strategy.offload != "none":  # the host link works at the same time
        data_comm = max(data_comm, host_transfer_seconds(priced, rank, stage.compute))
    return _parts(
        priced,
        rank,
        pipeline_comm=min(
            m * stage.pipeline_comm, schedule - m * (stage.compute + stage.tensor_comm)
        ),
        data_comm=data_comm,
        optimizer=optimizer_seconds(priced, rank),
        total=step_seconds,
    )


def _parts(
    priced: PricedLayout,
    rank: int,
    *,
    pipeline_comm: float,
    data_comm: float,
    optimizer: float,
    total: float,
) -> StepTimeBreakdown:
    """Split the step of a rank; idle is what is left of the total."""
    s, found, blocks = priced.strategy, pass_times(priced), priced.ranks[rank]
    m = s.gradient_accumulation_steps
    layers = layer_seconds(priced.recipe, priced.graph, priced.cluster.gpu, s, priced.constants)

    def over(sums: tuple[float, ...]) -> float:
        return m * sum(sums[block.stop] - sums[block.start] for block in blocks)

    # Recompute of all layers alike, and of those that partial checkpointing selects.
    backward, recompute = (
        over(layers.backward),
        over(layers.recompute) - over(found.partial_recompute_compute),
    )
    partly, partly_comm = partial_recompute_seconds(priced, found, blocks)
    parts = StepTimeBreakdown(
        forward_seconds=over(found.forward_compute),
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
    """Return 0 where the difference of two sums is rounding alone."""
    return 0.0 if abs(seconds) < 1e-9 * of_seconds else seconds
