"""Time of one optimizer step.

Compute: each layer's kernels (compute.py). Collectives: rings (collectives.py). Pipeline:
DeepSpeed's own instruction streams, simulated (schedule/), which is (m + p - 1) x stage where
stages are even (arXiv 2104.04473).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.cost.calibrated_costs import engine_overheads, shared_cores_step_seconds
from shardwright.cost.collective_seconds import (
    Group,
    all_reduce_seconds,
    gather_seconds,
    reduce_scatter_seconds,
    ring_start_seconds,
    send_seconds,
)
from shardwright.cost.communication_bytes import (
    backward_gather_fraction,
    gradient_reduction,
    pipeline_sends,
)
from shardwright.cost.layer_shapes import (
    ModelShapes,
    model_shapes,
    recomputed_products,
    uses_selective_op,
)
from shardwright.cost.layer_times import (
    FORWARD_SHARE,
    PassTimes,
    partial_recompute_seconds,
    pass_times,
    peak_flops,
)
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.task_costs import contrastive_loss_flops, feature_gather_seconds
from shardwright.cost.vision_encoder_flops import vision_encoder_flops
from shardwright.layout import interleaved_schedule
from shardwright.layout.formats import element_bytes
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Time
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.pipeline_step_time import MAX_SIMULATED_DUALPIPEV_RANKS, step_seconds
from shardwright.layout.zero_settings import BUCKET_NUMEL, PREFETCH_NUMEL

# Exposed time of the data-parallel collectives of one step, behind the compute of one micro-batch.
#
# How much hides, and what buckets reach of the links, are traits of whose engine runs
# (engines/engine_table.py).


def data_comm_seconds(layout: PricedLayout, rank: int, compute_seconds: float) -> float:
    """ZeRO 0 and 1: gradients once a step, reduced and gathered again, behind the last backward
    pass where no pipeline drains there. ZeRO-2 reduces at every micro-batch, ZeRO-3 gathers too."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    tied = _tied_seconds(layout)
    if s.zero_world_size == 1 and s.expert_replicas == 1:
        return tied
    if s.zero_stage == 3:
        return tied + _zero_3_seconds(layout, rank, compute_seconds)
    parts = _by_group(layout, rank, layout.trainable_numel_of(layout.ranks[rank]))
    reductions, gradient = gradient_reduction(layout)
    behind = 1 - FORWARD_SHARE if s.pipeline == 1 else 0.0
    if s.zero_stage == 0:
        reduce = sum(
            all_reduce_seconds(cluster, c, group, n * gradient, _buckets(n)) for n, group in parts
        )
        return tied + _exposed(layout, reduce, behind * compute_seconds)
    reduce, gather = (
        sum(seconds(cluster, c, group, n * size, _buckets(n)) for n, group in parts)
        / zero_efficiency(layout)
        for seconds, size in (
            (reduce_scatter_seconds, gradient),
            (gather_seconds, layout.element_bytes),
        )
    )
    if s.zero_stage == 1 and not layout.traits.zero_1_overlaps:
        behind = 0.0
    return tied + reductions * _exposed(layout, reduce, behind * compute_seconds) + gather


def _by_group(layout: PricedLayout, rank: int, numel: int) -> list[tuple[int, Group]]:
    """Of these parameters of a pipeline rank, those over all ranks, and those of experts over the
    ranks that have the same ones."""
    s = layout.strategy
    experts = layout.expert_numel_of(layout.ranks[rank])
    found = [(numel - experts, layout.group(s.zero_world_size, s.tensor))]
    if experts:
        apart = s.expert * s.expert_tensor_ranks
        found.append((int(experts / s.expert_shard_ratio), layout.group(s.expert_replicas, apart)))
    return found


def zero_efficiency(layout: PricedLayout) -> float:
    """What ZeRO's buckets reach of the links' rate. An assumed rate has the engine's own delays in
    it."""
    slow = layout.traits.bucketed_zero or (
        layout.traits.bucketed_pipeline and layout.strategy.pipeline > 1
    )
    if not slow or layout.cluster.gpu.is_cpu or layout.recipe.assume.mfu is not None:
        return 1.0
    return layout.constants.zero_reduction_efficiency


def _zero_3_seconds(layout: PricedLayout, rank: int, compute_seconds: float) -> float:
    """Each layer's parameters are gathered for forward and backward (see whole.py), and its
    gradients reduced, at every micro-batch, behind the compute (arXiv 1910.02054); with hpZ
    gathered from the second copy inside the node, but once a step (arXiv 2306.10209)."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    m, element = s.gradient_accumulation_steps, layout.element_bytes
    held, numel = layout.numel(rank), layout.trainable_numel_of(layout.ranks[rank])
    group = layout.group(s.zero_world_size, s.tensor)
    layers = sum(block.stop - block.start for block in layout.ranks[rank])
    efficiency, gathers_a_pass, reductions = zero_efficiency(layout), float(layers), float(layers)
    own = not (
        layout.traits.zero3_gathers_flat_layers
        or cluster.gpu.is_cpu
        or layout.recipe.assume.mfu is not None
    )
    if own:
        reductions = _buckets(numel)
        gathers_a_pass = max(gathers_a_pass, min(held / PREFETCH_NUMEL, layout.shapes.matrices))
    hooks = _hook_seconds(layout, rank) if own else 0.0
    again = backward_gather_fraction(layout, layout.ranks[rank])
    kinds = _by_group(layout, rank, numel)
    reduce = (
        sum(reduce_scatter_seconds(cluster, c, over, n * element, 0) for n, over in kinds)
        / efficiency
    )
    if len(kinds) > 1:  # the gathers are of the same bytes, experts' in calls of their own
        starts = (2 + again) * layers * ring_start_seconds(c, kinds[1][1])
        dense = ((1 + again) * gathers_a_pass + reductions) * ring_start_seconds(c, group)
        moved = (2 + again) * reduce
        return m * max(
            _exposed(layout, moved, compute_seconds) + starts + dense, hooks - compute_seconds
        )

    def micro_batch(forward: Group, backward: Group) -> float:
        """Gathers over these groups; the ring's steps do not hide: at each of them the ranks wait
        for one another."""
        gathered = list(
            zip((held * element, again * held * element), (forward, backward), strict=True)
        )
        gathers = (
            sum(gather_seconds(cluster, c, over, moved, 0) for moved, over in gathered) / efficiency
        )
        starts = gathers_a_pass * (
            ring_start_seconds(c, forward) + again * ring_start_seconds(c, backward)
        )
        starts += reductions * ring_start_seconds(c, group)
        return max(
            _exposed(layout, gathers + reduce, compute_seconds) + starts, hooks - compute_seconds
        )

    if s.hpz_partition_size == 1:
        return m * micro_batch(group, group)
    node = Group(ranks=s.hpz_partition_size, ranks_per_node=s.hpz_partition_size)
    if layout.adapter_sizes:  # frozen weights are never outdated
        return m * micro_batch(node, node)
    # An update outdates the second copy (DeepSpeed stage3.py, invalidate_secondary_tensor): the
    # next forward pass gathers over all ranks and makes it anew. It waits for the device at each
    # weight (partition_parameters.py, _partition_param_sec), so that its launches show: what two
    # tensor-parallel collectives a layer uncover, too.
    launches = 0.0 if cluster.gpu.is_cpu else 2 * layers * c.collective_host_seconds
    return micro_batch(group, node) + launches + (m - 1) * micro_batch(node, node)


def _hook_seconds(layout: PricedLayout, rank: int) -> float:
    """The host's floor of a micro-batch: a fetch and a release around each module that holds
    parameters, in the forward pass, where it is run again, and in the backward pass (DeepSpeed
    zero/parameter_offload.py)."""
    counted = (
        layout.shapes.modules
        if layout.problem.expert_matrices_are_modules
        else layout.shapes.stacked_modules
    )
    modules = sum(counted[block.stop] - counted[block.start] for block in layout.ranks[rank])
    passes = 2 + (
        layout.checkpointed_activations is None and layout.strategy.checkpointing == "full"
    )
    return 2 * passes * modules * layout.constants.hook_seconds


def _exposed(layout: PricedLayout, comm_seconds: float, compute_seconds: float) -> float:
    """What is not hidden behind this much compute. An assumed rate is a whole run's, which has its
    exposed traffic in it: only what no compute could hide is added."""
    assumed = layout.recipe.assume.mfu is not None
    overlap = 1.0 if assumed else layout.constants.overlap(layout.traits.traffic)
    return comm_seconds - overlap * min(comm_seconds, compute_seconds)


def _buckets(numel: int) -> float:
    return max(1.0, numel / BUCKET_NUMEL)


def _tied_seconds(layout: PricedLayout) -> float:
    """The first and the last stage add up the gradients of a tensor that both hold."""
    s = layout.strategy
    if s.ends_share_rank or not layout.shapes.shared_numel:
        return 0.0
    size = layout.shapes.shared_numel * element_bytes(layout.accumulation_dtype)
    distance = s.tensor * s.shards * (s.pipeline - 1)
    return send_seconds(layout.cluster, layout.constants, distance, size)


# Seconds that offloaded states add to a step: the link to the host, and the update on its memory
# (arXiv 2101.06840).


# A micro-batch of `offload: parameters` fetches its share twice, for the forward and for the
# backward pass.
FETCHES = 2


def cpu_optimizer_seconds(layout: PricedLayout, numel: float) -> float:
    """The update of a rank's share of so many parameters on the CPU (the node's GPUs share its
    memory), and the way back to the GPU. In a pipeline and at ZeRO-1 gradients go to the host once
    a step, after the last backward pass."""
    s, c = layout.strategy, layout.constants
    updated = numel / s.zero_world_size
    rate = (
        c.host_bytes_per_second
        if s.gradient_accumulation_steps == 1
        else c.accumulated_host_bytes_per_second
    )
    traffic = OPTIMIZERS[layout.recipe.training.optimizer.name].host_traffic_bytes
    update = traffic * updated * layout.cluster.gpus_per_node / rate
    copies = 0 if s.offload == "parameters" else 1
    if _once_a_step(layout):
        copies += 1 + (FETCHES * s.gradient_accumulation_steps if s.offload == "parameters" else 0)
    return update + copies * updated * layout.element_bytes / c.host_link_bytes_per_second


def _once_a_step(layout: PricedLayout) -> bool:
    return layout.strategy.pipeline > 1 or layout.strategy.zero_stage <= 1


def host_transfer_seconds(layout: PricedLayout, rank: int, compute_seconds: float) -> float:
    """Exposed, of one step: at each micro-batch gradients go to the host, and parameters come from
    it, behind the compute as far as it reaches."""
    s, c = layout.strategy, layout.constants
    if _once_a_step(layout):
        return 0.0
    moved = (
        (1 + (FETCHES if s.offload == "parameters" else 0))
        * layout.numel(rank)
        / s.zero_world_size
        * layout.element_bytes
    )
    each = moved / c.host_link_bytes_per_second
    return s.gradient_accumulation_steps * (
        each - c.overlap(layout.traits.traffic) * min(each, compute_seconds)
    )


# Forward + backward FLOPs, in forwards; recomputation adds its share on top.
FORWARDS_PER_STEP = 3


class StageSeconds(NamedTuple):
    """One micro-batch, forward and backward, on one pipeline rank."""

    compute: float
    tensor_comm: float
    pipeline_comm: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor_comm + self.pipeline_comm


def schedule_seconds(layout: PricedLayout, found: PassTimes, stages: list[StageSeconds]) -> float:
    """From the first forward pass to the last backward pass: the simulation, or closed forms where
    they are exact (one stage, 1F1B), and the bound by the slowest rank where nothing can run it
    (too few micro-batches, or a rest of them under interleaving; a rule says so), or DualPipeV has
    too many ranks."""
    s, m = layout.strategy, layout.strategy.gradient_accumulation_steps
    totals = [stage.total for stage in stages]
    if s.pipeline == 1:
        return m * totals[0]
    if not is_simulated(s):
        return m * max(totals) + (sum(totals) - max(totals)) / bubble_divisor(s)
    forward, backward = stage_pass_seconds(layout, found)
    if s.is_interleaved:
        # What a rank waits for its messages is a part of its passes: one around each.
        forward, backward = (
            tuple(x + found.send_seconds for x in each) for each in (forward, backward)
        )
        return interleaved_schedule.step_seconds(s.pipeline, m, forward, backward)
    return step_seconds(s.schedule, m, forward, backward, found.send_seconds)


def stage_pass_seconds(
    layout: PricedLayout, found: PassTimes
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of one micro-batch's forward and backward pass over each part of the model in order,
    collectives included: DualPipeV's go from the last rank back to the first. What
    `schedule.events.simulate` and `interleaved` take. found: of this layout."""
    blocks = sorted(
        (block for blocks in layout.ranks for block in blocks), key=lambda block: block.start
    )
    extra = found.per_rank_seconds * layout.strategy.pipeline / len(blocks)

    def over(
        compute: tuple[float, ...], comm: tuple[float, ...], fixed: float
    ) -> tuple[float, ...]:
        return tuple(
            compute[b.stop] - compute[b.start] + comm[b.stop] - comm[b.start] + fixed
            for b in blocks
        )

    forward = over(found.forward_compute, found.forward_comm, extra * FORWARD_SHARE)
    backward = over(found.backward_compute, found.backward_comm, extra * (1 - FORWARD_SHARE))
    if layout.checkpointed_activations is not None:
        again = [sum(partial_recompute_seconds(layout, found, [block])) for block in blocks]
        backward = tuple(map(operator.add, backward, again))
    return forward, backward


def is_simulated(s: Layout) -> bool:
    """Whether the step is the simulated one, not a bound by the slowest rank."""
    enough = (
        s.gradient_accumulation_steps >= 2 * s.pipeline
        and s.pipeline <= MAX_SIMULATED_DUALPIPEV_RANKS
    )
    if s.is_interleaved:
        return s.gradient_accumulation_steps % s.pipeline == 0
    return s.pipeline == 1 or s.schedule == "1f1b" or enough


def bubble_divisor(s: Layout) -> float:
    """How much shorter fill and drain are than 1F1B's p - 1 forwards and backwards, where stages
    are even.

    Interleaving by v divides them by v (arXiv 2104.04473). DeepSpeed's DualPipeV, simulated with
    backward = 2 x forward, idles 5/2 p - 3 forwards instead of 3 (p - 1).
    """
    if s.pipeline_schedule.is_v_shaped:
        return 6 * (s.pipeline - 1) / (5 * s.pipeline - 6)
    return s.virtual_stages


def estimate_time(layout: PricedLayout) -> Time:
    """compute, comms, optimizer and bubble are those of the slowest pipeline rank and add up to the
    step."""
    s = layout.strategy
    m = s.gradient_accumulation_steps
    found = pass_times(layout)
    stages = [stage_seconds(layout, rank, found) for rank in range(s.pipeline)]
    slowest = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    worst = stages[slowest]
    schedule = schedule_seconds(layout, found, stages)
    # DualPipeV's messages to both neighbours may overlap while it fills.
    pipeline_comm = min(m * worst.pipeline_comm, schedule - m * (worst.compute + worst.tensor_comm))
    bubble = max(0.0, schedule - m * (worst.compute + worst.tensor_comm) - pipeline_comm)
    data_comm = _data_comm_seconds(layout, stages)
    if s.offload != "none":  # another link, at the same time
        data_comm = max(data_comm, host_transfer_seconds(layout, slowest, worst.compute))
    trained = [layout.trainable_numel_of(blocks) for blocks in layout.ranks]
    update = {numel: _optimizer_seconds(layout, numel) for numel in set(trained)}
    optimizers = [update[numel] for numel in trained]
    optimizer = max(optimizers)
    alone = schedule + data_comm + optimizer
    computing = [m * stage.compute + own for stage, own in zip(stages, optimizers, strict=True)]
    reducing = [m * stage.tensor_comm + data_comm for stage in stages]
    step = shared_cores_step_seconds(layout.recipe, layout.cluster, alone, computing, reducing)
    bubble += step - alone  # it waits for a core
    mean_busy = m * sum(stage.total for stage in stages) / s.pipeline
    world = s.world_size
    length = layout.recipe.training.sequence_length
    tokens = layout.recipe.training.global_batch_size * length
    # No gradient of a frozen weight is computed.
    forwards = FORWARDS_PER_STEP - layout.language_model_is_frozen
    model_flops = forwards * forward_flops_per_token(layout.shapes, length) * tokens
    model_flops += (
        sum(vision_encoder_flops(layout.recipe, layout.graph))
        * layout.recipe.training.global_batch_size
    )
    model_flops += FORWARDS_PER_STEP * contrastive_loss_flops(layout.recipe, layout.graph)
    hardware_flops = model_flops + recomputed_flops_per_token(layout) * tokens
    peak = peak_flops(layout.cluster.gpu, layout.recipe.training.precision)
    return Time(
        step_seconds=step,
        compute_seconds=m * worst.compute,
        tensor_comm_seconds=m * worst.tensor_comm,
        pipeline_comm_seconds=pipeline_comm,
        data_comm_seconds=data_comm,
        optimizer_seconds=optimizer,
        bubble_seconds=bubble,
        bubble_fraction=max(0.0, 1 - mean_busy / schedule),
        tokens_per_second_per_gpu=tokens / step / world,
        model_tflops_per_gpu=model_flops / step / world / 1e12,
        hardware_tflops_per_gpu=hardware_flops / step / world / 1e12,
        mfu=model_flops / step / world / peak,
    )


def least_interleaved_seconds(layout: PricedLayout) -> float:
    """Of an interleaved pipeline's step, without its simulation. A rank begins behind the first
    parts of the ranks before it, and ends before they go backward once more."""
    s, found = layout.strategy, pass_times(layout)
    stages = [stage_seconds(layout, rank, found) for rank in range(s.pipeline)]
    parts = [
        forward + backward
        for forward, backward in zip(*stage_pass_seconds(layout, found), strict=True)
    ]
    before = itertools.accumulate(parts[: s.pipeline], initial=0.0)
    busy = (
        s.gradient_accumulation_steps * stage.total + first
        for stage, first in zip(stages, before, strict=False)
    )
    return (
        max(busy)
        + _data_comm_seconds(layout, stages)
        + max(optimizer_seconds(layout, r) for r in range(s.pipeline))
    )


def _data_comm_seconds(layout: PricedLayout, stages: Sequence[StageSeconds]) -> float:
    each = (data_comm_seconds(layout, rank, stages[rank].compute) for rank in _unlike_ranks(layout))
    return max(each) + feature_gather_seconds(layout)


def forward_flops_per_token(shapes: ModelShapes, sequence_length: int) -> int:
    """Matrix products of the whole model, full S x S attention, the head included, the lookup
    not."""
    products, _, scores = shapes.decoder_flops
    return products + scores * sequence_length + shapes.head_flops


def recomputed_flops_per_token(layout: PricedLayout) -> int:
    """As they are counted: what a checkpoint leaves out of a repeated layer because nobody reads it
    is in the time alone."""
    head = layout.shapes.head_flops if layout.strategy.loss == "chunked" else 0
    return head + _recomputed_in_layers(layout)


def _recomputed_in_layers(layout: PricedLayout) -> int:
    """full: every decoder layer, or the first ones of each stage; selective: the scores and the
    attention module's projections, Megatron's the scores alone, torch's by operator every second
    product (see uses_selective_op)."""
    products, projections, scores = layout.shapes.decoder_flops
    scores *= layout.recipe.training.sequence_length
    if layout.checkpointed_activations is not None:
        return _recomputed_in_first_layers(layout)
    match layout.strategy.checkpointing:
        case "full":
            return products + scores
        case "selective" if not layout.traits.selective_recomputes_projections:
            return scores
        case "selective" if uses_selective_op(layout.graph, layout.recipe.assume.kernels):
            whole = model_shapes(layout.graph, 1)
            dropped = [
                2 * sum(p.n * p.k for p in recomputed_products(kind.products))
                for kind in whole.kinds
            ]
            again = sum(dropped[kind] for kind in whole.kind_of if kind >= 0)
            return again + (scores if layout.graph.attention == "eager" else 0)
        case "selective":
            return projections + scores
        case _:
            return 0


def _recomputed_in_first_layers(layout: PricedLayout) -> int:
    length, blocks = (
        layout.recipe.training.sequence_length,
        itertools.chain.from_iterable(layout.ranks),
    )
    ends = [(block.start, layout.checkpointed_stop(block.start, block.stop)) for block in blocks]
    layers = itertools.chain.from_iterable(layout.graph.layers[start:stop] for start, stop in ends)
    return sum(
        x.matmul_flops_per_token + x.attention_flops_per_token_per_position * length
        for x in layers
        if x.kind == "decoder"
    )


def _unlike_ranks(layout: PricedLayout) -> Iterable[int]:
    """One each of those whose data-parallel collectives are the same. Pipelines run at ZeRO 0 or 1:
    gradients are reduced when all passes are through, so that their number decides."""
    if layout.strategy.zero_stage > 1:
        return range(layout.strategy.pipeline)
    held = {
        (layout.trainable_numel_of(b), layout.expert_numel_of(b)): rank
        for rank, b in enumerate(layout.ranks)
    }
    return held.values()


def stage_seconds(layout: PricedLayout, rank: int, found: PassTimes) -> StageSeconds:
    s, blocks = layout.strategy, layout.ranks[rank]

    def over(sums: tuple[float, ...]) -> float:
        return sum([sums[block.stop] - sums[block.start] for block in blocks])

    again = partial_recompute_seconds(layout, found, blocks)
    # Those that it sends, and those that it waits for: interleaved, both at once.
    waits = pipeline_sends(layout, rank) * (1 if s.is_interleaved else 2)
    return StageSeconds(
        compute=over(found.forward_compute)
        + over(found.backward_compute)
        + again[0]
        + found.per_rank_seconds,
        tensor_comm=over(found.forward_comm) + over(found.backward_comm) + again[1],
        pipeline_comm=waits * found.send_seconds,
    )


def data_parallel_seconds(layout: PricedLayout) -> float:
    """Data-parallel collectives of a step, of a layout without a pipeline."""
    return data_comm_seconds(layout, 0, stage_seconds(layout, 0, pass_times(layout)).compute)


def per_step_seconds_per_parameter(layout: PricedLayout) -> float:
    """Per parameter of a pipeline rank at ZeRO 0 or 1 (what pipelines run): its gradient's
    collectives and its update, without the starts of rings. A share of what `data_comm_seconds` and
    `optimizer_seconds` say of a rank."""
    s, numel = layout.strategy, max(1.0, layout.shapes.numel[-1] / layout.strategy.pipeline)
    return _reduced_seconds(
        layout, layout.group(s.zero_world_size, s.tensor), numel
    ) / numel + _update_seconds(layout, 1)


def least_once_a_step_seconds(layout: PricedLayout, layers: int = 0) -> float:
    """Of the pipeline rank with the most parameters at ZeRO 0 or 1, wherever layers are placed:
    what a mean rank's gradients and update take. Experts that are spread over ranks are reduced
    over those with the same ones. layers: decoder layers, all of whose parameters are trained, that
    some rank has at least."""
    s, shapes = layout.strategy, layout.shapes
    numel = (
        layout.adapter_sizes[-1] if layout.adapter_sizes else shapes.numel[-1] - shapes.shared_numel
    )
    numel -= layout.frozen[-1] if layout.frozen else 0
    spreads = s.shards_experts and not layout.has_frozen
    experts = shapes.expert_numel[-1] if spreads else 0
    held = [((numel - experts) / s.pipeline, experts / s.pipeline)]
    if layers:
        numels, expert_numel_of = (
            np.diff(each[1:-1]) for each in (shapes.numel, shapes.expert_numel)
        )
        shared = expert_numel_of * spreads
        held.append((layers * float((numels - shared).min()), layers * float(shared.min())))
    return max(_least_reduced_seconds(layout, *each) for each in held) + max(
        _update_seconds(layout, sum(each)) for each in held
    )


def _least_reduced_seconds(layout: PricedLayout, numel: float, experts: float) -> float:
    """numel: without the experts that are spread over ranks."""
    s = layout.strategy
    if s.zero_world_size == 1 and s.expert_replicas == 1:
        return 0.0
    seconds = _reduced_seconds(layout, layout.group(s.zero_world_size, s.tensor), numel)
    if experts:
        over = layout.group(s.expert_replicas, s.expert * s.expert_tensor_ranks)
        seconds += _reduced_seconds(layout, over, experts / s.expert_shard_ratio)
    return seconds


def _reduced_seconds(layout: PricedLayout, group: Group, numel: float) -> float:
    """Gradients of so many parameters over the group at ZeRO 0 or 1, without the starts of
    rings."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    gradient = element_bytes(layout.accumulation_dtype)
    if s.zero_stage == 0:
        return all_reduce_seconds(cluster, c, group, gradient * numel, 0)
    moved = gradient + layout.element_bytes
    return gather_seconds(cluster, c, group, moved * numel, 0) / zero_efficiency(layout)


def optimizer_seconds(layout: PricedLayout, rank: int) -> float:
    return _optimizer_seconds(layout, layout.trainable_numel_of(layout.ranks[rank]))


def _optimizer_seconds(layout: PricedLayout, numel: int) -> float:
    own = engine_overheads(layout.recipe, layout.graph, layout.strategy)
    once = own.step_seconds.value if own else 0.0
    return _update_seconds(layout, numel) + once


def _update_seconds(layout: PricedLayout, numel: float) -> float:
    if layout.strategy.offload != "none":
        return cpu_optimizer_seconds(layout, numel)
    updated = numel / (layout.strategy.zero_world_size if layout.strategy.zero_stage >= 1 else 1)
    if own := engine_overheads(layout.recipe, layout.graph, layout.strategy):
        return updated * own.parameter_seconds.value
    traffic = OPTIMIZERS[layout.recipe.training.optimizer.name].traffic
    return _traffic_seconds(layout, traffic * layout.constants.optimizer_traffic_bytes * updated)


def _traffic_seconds(layout: PricedLayout, moved_bytes: float) -> float:
    return moved_bytes / (
        layout.cluster.gpu.hbm_bytes_per_second * layout.constants.memory_efficiency
    )
