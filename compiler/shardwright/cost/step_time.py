"""Estimate the time of one optimizer step.

Compute: each layer's kernels (layer_times.py). Collectives: rings (collective_seconds.py).
Pipeline: DeepSpeed's instruction streams, simulated (layout/pipeline_simulation.py), which take (m
+ p - 1) x stage where stages are even (arXiv 2104.04473).
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
    gradient_reduction,
    pipeline_sends,
    regathered_fraction,
)
from shardwright.cost.layer_shapes import (
    ModelShapes,
    model_shapes,
    recomputed_product_flops,
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
from shardwright.cost.muon_traffic import gathered_matrix_numel
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.cost.task_costs import contrastive_loss_flops, feature_gather_seconds
from shardwright.cost.vision_encoder_flops import vision_encoder_flops
from shardwright.layout import interleaved_schedule
from shardwright.layout.formats import MASTER_BYTES, element_bytes
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Time
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.pipeline_step_time import MAX_SIMULATED_DUALPIPEV_RANKS, step_seconds
from shardwright.layout.zero_settings import BUCKET_NUMEL, PREFETCH_NUMEL


class StageSeconds(NamedTuple):
    """Hold one micro-batch's forward and backward seconds on one pipeline rank."""

    compute: float
    tensor_comm: float
    pipeline_comm: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor_comm + self.pipeline_comm


# Exposed data-parallel collectives. The overlap and the rate of buckets are traits of the engine
# (engines/engine_table.py).


def data_comm_seconds(priced: PricedLayout, rank: int, stage: StageSeconds) -> float:
    """Return the exposed seconds of a step's data-parallel collectives on a rank of this stage.

    ZeRO 0 and 1 reduce gradients and gather parameters once a step, overlapping with the last
    backward pass where no pipeline drains there. ZeRO-2 reduces every micro-batch, ZeRO-3 also
    gathers.
    """
    s, c, cluster = priced.strategy, priced.constants, priced.cluster
    tied = _tied_seconds(priced)
    if s.zero_world_size == 1 and s.expert_replicas == 1:
        return tied
    if s.zero_stage == 3:
        return tied + _zero_3_seconds(priced, rank, stage)
    parts = _by_group(priced, rank, priced.trainable_numel_of(priced.ranks[rank]))
    reductions, gradient = gradient_reduction(priced)
    behind = 1 - FORWARD_SHARE if s.pipeline == 1 else 0.0
    if s.zero_stage == 0:
        reduce = sum(
            all_reduce_seconds(cluster, c, group, n * gradient, _buckets(n)) for n, group in parts
        )
        return tied + _exposed(priced, reduce, behind * stage.compute)
    reduce, gather = (
        sum(seconds(cluster, c, group, n * size, _buckets(n)) for n, group in parts)
        / zero_efficiency(priced)
        for seconds, size in (
            (reduce_scatter_seconds, gradient),
            (gather_seconds, priced.element_bytes),
        )
    )
    if s.zero_stage == 1 and not priced.traits.zero_1_overlaps:
        behind = 0.0
    return tied + reductions * _exposed(priced, reduce, behind * stage.compute) + gather


def _by_group(priced: PricedLayout, rank: int, numel: int) -> list[tuple[int, Group]]:
    """Split a pipeline rank's parameters by group: all ranks, or for experts the ranks with the
    same ones."""
    s = priced.strategy
    experts = priced.expert_numel_of(priced.ranks[rank])
    found = [(numel - experts, priced.group(s.zero_world_size, s.tensor))]
    if experts:
        apart = s.expert * s.expert_tensor_ranks
        found.append((int(experts / s.expert_shard_ratio), priced.group(s.expert_replicas, apart)))
    return found


def zero_efficiency(priced: PricedLayout) -> float:
    """Return the share of the links' rate that ZeRO's buckets reach.

    An assumed rate already includes the engine's delays.
    """
    slow = priced.traits.bucketed_zero or (
        priced.traits.bucketed_pipeline and priced.strategy.pipeline > 1
    )
    if not slow or priced.cluster.gpu.is_cpu or priced.recipe.assume.mfu is not None:
        return 1.0
    return priced.constants.zero_reduction_efficiency


def _zero_3_seconds(priced: PricedLayout, rank: int, stage: StageSeconds) -> float:
    """Return the exposed seconds of ZeRO-3.

    Each micro-batch gathers each layer's parameters for forward and backward (see
    regathered_fraction) and reduces its gradients, overlapping with compute (arXiv 1910.02054).
    With hpZ it gathers from the second copy inside the node, except once a step (arXiv 2306.10209).
    The host runs its hooks while the GPU computes and while tensor-parallel collectives run.
    """
    s, c, cluster = priced.strategy, priced.constants, priced.cluster
    m, element = s.gradient_accumulation_steps, priced.element_bytes
    held, numel = priced.numel(rank), priced.trainable_numel_of(priced.ranks[rank])
    group = priced.group(s.zero_world_size, s.tensor)
    layers = sum(block.stop - block.start for block in priced.ranks[rank])
    efficiency, gathers_a_pass, reductions = zero_efficiency(priced), float(layers), float(layers)
    own = not (
        priced.traits.zero3_gathers_flat_layers
        or cluster.gpu.is_cpu
        or priced.recipe.assume.mfu is not None
    )
    if own:
        reductions = _buckets(numel)
        gathers_a_pass = max(gathers_a_pass, min(held / PREFETCH_NUMEL, priced.shapes.matrices))
    hooks = _hook_seconds(priced, rank) if own else 0.0
    waits_for_hooks = hooks - stage.compute - stage.tensor_comm
    regathered = regathered_fraction(priced, priced.ranks[rank])
    kinds = _by_group(priced, rank, numel)
    reduce = (
        sum(reduce_scatter_seconds(cluster, c, over, n * element, 0) for n, over in kinds)
        / efficiency
    )
    if len(kinds) > 1:  # experts are gathered in separate calls
        starts = (2 + regathered) * layers * ring_start_seconds(c, kinds[1][1])
        dense = ((1 + regathered) * gathers_a_pass + reductions) * ring_start_seconds(c, group)
        moved = (2 + regathered) * reduce
        return m * max(_exposed(priced, moved, stage.compute) + starts + dense, waits_for_hooks)

    def micro_batch(forward: Group, backward: Group) -> float:
        """Gather over these groups; ring latency is exposed, because ranks wait at each step."""
        gathered = list(
            zip((held * element, regathered * held * element), (forward, backward), strict=True)
        )
        gathers = (
            sum(gather_seconds(cluster, c, over, moved, 0) for moved, over in gathered) / efficiency
        )
        starts = gathers_a_pass * (
            ring_start_seconds(c, forward) + regathered * ring_start_seconds(c, backward)
        )
        starts += reductions * ring_start_seconds(c, group)
        return max(_exposed(priced, gathers + reduce, stage.compute) + starts, waits_for_hooks)

    if s.hpz_partition_size == 1:
        return m * micro_batch(group, group)
    node = Group(ranks=s.hpz_partition_size, ranks_per_node=s.hpz_partition_size)
    if priced.adapter_sizes:  # frozen weights are never outdated
        return m * micro_batch(node, node)
    # An update outdates the second copy (DeepSpeed stage3.py, invalidate_secondary_tensor): the
    # next forward pass gathers over all ranks and makes it anew. It waits for the device at each
    # weight (partition_parameters.py, _partition_param_sec), so that its launches show: what two
    # tensor-parallel collectives a layer uncover, too.
    is_free = cluster.gpu.kind.launches_are_free
    launches = 0.0 if is_free else 2 * layers * c.collective_host_seconds
    return micro_batch(group, node) + launches + (m - 1) * micro_batch(node, node)


def _hook_seconds(priced: PricedLayout, rank: int) -> float:
    """Return the host's minimum seconds of a micro-batch.

    ZeRO-3 fetches and releases around each module with parameters in each forward pass, its
    recomputation and the backward pass (DeepSpeed zero/parameter_offload.py).
    """
    counted = priced.shapes.modules
    modules = sum(counted[block.stop] - counted[block.start] for block in priced.ranks[rank])
    passes = 2 + (
        priced.checkpointed_activations is None and priced.strategy.checkpointing == "full"
    )
    passes += priced.recipe.training.objective.traits.forward_only_passes
    return 2 * passes * modules * priced.constants.hook_seconds


def _exposed(priced: PricedLayout, comm_seconds: float, compute_seconds: float) -> float:
    """Return the communication that does not overlap with this much compute.

    An assumed rate is a whole run's and includes exposed traffic, so only what no compute could
    cover is added.
    """
    assumed = priced.recipe.assume.mfu is not None
    overlap = 1.0 if assumed else priced.constants.of_family("overlap", priced.traits.traffic)
    return comm_seconds - overlap * min(comm_seconds, compute_seconds)


def _buckets(numel: int) -> float:
    return max(1.0, numel / BUCKET_NUMEL)


def _tied_seconds(priced: PricedLayout) -> float:
    """Return the seconds in which the first and last stage add up a tied tensor's gradients."""
    s = priced.strategy
    if s.ends_share_rank or not priced.shapes.shared_numel:
        return 0.0
    size = priced.shapes.shared_numel * element_bytes(priced.accumulation_dtype)
    distance = s.tensor * s.zero_world_size * (s.pipeline - 1)
    return send_seconds(priced.cluster, priced.constants, distance, size)


# Seconds that offloaded states add to a step: the link to the host, and the update on its memory
# (arXiv 2101.06840).


# A micro-batch of `offload: parameters` fetches its share twice, for the forward and for the
# backward pass.
FETCHES = 2


def cpu_optimizer_seconds(priced: PricedLayout, numel: float) -> float:
    """Return the seconds of a rank's update on the CPU and its way back to the GPU.

    The node's GPUs share its memory. In a pipeline and at ZeRO-1 gradients go to the host once a
    step, after the last backward pass.
    """
    s, c = priced.strategy, priced.constants
    updated = numel / s.zero_world_size
    if priced.traits.overlaps_host_update:
        return _overlapped_host_update_seconds(priced, updated)
    rate = (
        c.host_bytes_per_second
        if s.gradient_accumulation_steps == 1
        else c.accumulated_host_bytes_per_second
    )
    traffic = OPTIMIZERS[priced.recipe.training.optimizer.name].host_traffic_bytes
    update = traffic * updated * priced.cluster.gpus_per_node / rate
    copies = 0 if s.offload == "parameters" else 1
    if _once_a_step(priced):
        copies += 1 + (FETCHES * s.gradient_accumulation_steps if s.offload == "parameters" else 0)
    return update + copies * updated * priced.element_bytes / c.host_link_bytes_per_second


def _overlapped_host_update_seconds(priced: PricedLayout, updated: float) -> float:
    """Return the seconds of a rank's update while other tensors are on the link.

    Megatron-Core's HybridDeviceOptimizer queues the copies of all gradients to pinned memory and
    runs torch's AdamW on each tensor as its gradient arrives, so their way is hidden
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py). Memory bounds that update as it
    does DeepSpeed's CPUAdam (torch, ATen/native/cpu/FusedAdamKernel.cpp); the host writes no
    weights in half precision. Its fp32 masters are not pinned: the thread that updates also copies
    them for the link, so their way back adds up.
    """
    c = priced.constants
    traffic = OPTIMIZERS[priced.recipe.training.optimizer.name].host_traffic_bytes
    traffic += 2 * MASTER_BYTES - element_bytes("bf16")
    update = traffic * updated * priced.cluster.gpus_per_node / c.host_bytes_per_second
    return update + MASTER_BYTES * updated / c.host_link_bytes_per_second


def _once_a_step(priced: PricedLayout) -> bool:
    return priced.strategy.pipeline > 1 or priced.strategy.zero_stage <= 1


def host_transfer_seconds(priced: PricedLayout, rank: int, compute_seconds: float) -> float:
    """Return a step's exposed transfers to and from the host at each micro-batch."""
    s, c = priced.strategy, priced.constants
    if _once_a_step(priced):
        return 0.0
    moved = (
        (1 + (FETCHES if s.offload == "parameters" else 0))
        * priced.numel(rank)
        / s.zero_world_size
        * priced.element_bytes
    )
    each = moved / c.host_link_bytes_per_second
    return s.gradient_accumulation_steps * (
        each - c.of_family("overlap", priced.traits.traffic) * min(each, compute_seconds)
    )


# Forward and backward FLOPs over forward FLOPs, without recomputation.
FORWARDS_PER_STEP = 3


def schedule_seconds(priced: PricedLayout, found: PassTimes, stages: list[StageSeconds]) -> float:
    """Return the seconds from the first forward pass to the last backward pass.

    Uses closed forms where they are exact (one stage, 1F1B), else the simulation. The slowest rank
    bounds a schedule that cannot run (too few micro-batches, or a remainder under interleaving; a
    rule reports it), and a DualPipeV with too many ranks.
    """
    s, m = priced.strategy, priced.strategy.gradient_accumulation_steps
    totals = [stage.total for stage in stages]
    if s.pipeline == 1:
        return m * totals[0]
    if not is_simulated(s):
        return m * max(totals) + (sum(totals) - max(totals)) / bubble_divisor(s)
    forward, backward = stage_pass_seconds(priced, found)
    if s.is_interleaved:
        # Each pass includes the wait for one message.
        forward, backward = (
            tuple(x + found.send_seconds for x in each) for each in (forward, backward)
        )
        return interleaved_schedule.step_seconds(s.pipeline, m, forward, backward)
    return step_seconds(s.schedule, m, forward, backward, found.send_seconds)


def stage_pass_seconds(
    priced: PricedLayout, found: PassTimes
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return forward and backward seconds of one micro-batch by stage, collectives included.

    Stages are in model order: DualPipeV's return from the last rank to the first. The simulations
    of `pipeline_simulation` and `interleaved_schedule` take these.
    """
    blocks = sorted(
        (block for blocks in priced.ranks for block in blocks), key=lambda block: block.start
    )
    extra = found.per_rank_seconds * priced.strategy.pipeline / len(blocks)

    def over(
        compute: tuple[float, ...], comm: tuple[float, ...], fixed: float
    ) -> tuple[float, ...]:
        return tuple(
            compute[b.stop] - compute[b.start] + comm[b.stop] - comm[b.start] + fixed
            for b in blocks
        )

    forward = over(found.forward_compute, found.forward_comm, extra * FORWARD_SHARE)
    backward = over(found.backward_compute, found.backward_comm, extra * (1 - FORWARD_SHARE))
    if priced.checkpointed_activations is not None:
        recompute = [sum(partial_recompute_seconds(priced, found, [block])) for block in blocks]
        backward = tuple(map(operator.add, backward, recompute))
    return forward, backward


def is_simulated(s: Layout) -> bool:
    """Return whether the step is simulated, not bounded by the slowest rank."""
    enough = (
        s.gradient_accumulation_steps >= 2 * s.pipeline
        and s.pipeline <= MAX_SIMULATED_DUALPIPEV_RANKS
    )
    if s.is_interleaved:
        return s.gradient_accumulation_steps % s.pipeline == 0
    return s.pipeline == 1 or s.schedule == "1f1b" or enough


def bubble_divisor(s: Layout) -> float:
    """Return by how much fill and drain are shorter than 1F1B's p - 1 passes, for even stages.

    Interleaving by v divides them by v (arXiv 2104.04473). DeepSpeed's DualPipeV, simulated with
    backward = 2 x forward, idles 5/2 p - 3 forwards instead of 3 (p - 1).
    """
    if s.pipeline_schedule.is_v_shaped:
        return 6 * (s.pipeline - 1) / (5 * s.pipeline - 6)
    return s.virtual_stages


def estimate_time(priced: PricedLayout) -> Time:
    """Estimate the step; the parts are the slowest pipeline rank's and add up to the step."""
    s = priced.strategy
    m = s.gradient_accumulation_steps
    found = pass_times(priced)
    stages = [stage_seconds(priced, rank, found) for rank in range(s.pipeline)]
    slowest = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    worst = stages[slowest]
    schedule = schedule_seconds(priced, found, stages)
    # DualPipeV's messages to both neighbours may overlap during the fill.
    pipeline_comm = min(m * worst.pipeline_comm, schedule - m * (worst.compute + worst.tensor_comm))
    bubble = max(0.0, schedule - m * (worst.compute + worst.tensor_comm) - pipeline_comm)
    data_comm = _data_comm_seconds(priced, stages)
    if s.offload != "none":  # another link, at the same time
        data_comm = max(data_comm, host_transfer_seconds(priced, slowest, worst.compute))
    trained = [priced.trainable_numel_of(blocks) for blocks in priced.ranks]
    update = {numel: _optimizer_seconds(priced, numel) for numel in set(trained)}
    optimizers = [
        update[numel] + newton_schulz_seconds(priced, blocks)
        for numel, blocks in zip(trained, priced.ranks, strict=True)
    ]
    optimizer = max(optimizers)
    alone = schedule + data_comm + optimizer
    computing = [m * stage.compute + own for stage, own in zip(stages, optimizers, strict=True)]
    reducing = [m * stage.tensor_comm + data_comm for stage in stages]
    step = shared_cores_step_seconds(priced.recipe, priced.cluster, alone, computing, reducing)
    bubble += step - alone  # the rank waits for a core
    mean_busy = m * sum(stage.total for stage in stages) / s.pipeline
    world = s.world_size
    length = priced.recipe.training.sequence_length
    tokens = priced.recipe.training.tokens_per_step
    # Frozen weights have no gradient.
    forwards = FORWARDS_PER_STEP - priced.language_model_is_frozen
    forwards += priced.recipe.training.objective.traits.forward_only_passes
    model_flops = forwards * forward_flops_per_token(priced.shapes, length) * tokens
    model_flops += (
        sum(vision_encoder_flops(priced.recipe, priced.graph))
        * priced.recipe.training.global_batch_size
    )
    model_flops += FORWARDS_PER_STEP * contrastive_loss_flops(priced.recipe, priced.graph)
    hardware_flops = model_flops + recomputed_flops_per_token(priced) * tokens
    peak = peak_flops(priced.cluster.gpu, priced.recipe.training.precision)
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


def least_interleaved_seconds(priced: PricedLayout) -> float:
    """Return a lower bound of an interleaved pipeline's step, without simulation.

    A rank begins after the first stages of the previous ranks, and ends before their last backward
    passes.
    """
    s, found = priced.strategy, pass_times(priced)
    stages = [stage_seconds(priced, rank, found) for rank in range(s.pipeline)]
    parts = [
        forward + backward
        for forward, backward in zip(*stage_pass_seconds(priced, found), strict=True)
    ]
    before = itertools.accumulate(parts[: s.pipeline], initial=0.0)
    busy = (
        s.gradient_accumulation_steps * stage.total + first
        for stage, first in zip(stages, before, strict=False)
    )
    return (
        max(busy)
        + _data_comm_seconds(priced, stages)
        + max(optimizer_seconds(priced, r) for r in range(s.pipeline))
    )


def _data_comm_seconds(priced: PricedLayout, stages: Sequence[StageSeconds]) -> float:
    each = (data_comm_seconds(priced, rank, stages[rank]) for rank in _unlike_ranks(priced))
    return max(each) + feature_gather_seconds(priced)


def forward_flops_per_token(shapes: ModelShapes, sequence_length: int) -> int:
    """Count the model's matrix products and full S x S attention, head included, lookup not."""
    products, _, scores = shapes.decoder_flops
    return products + scores * sequence_length + shapes.head_flops


def recomputed_flops_per_token(priced: PricedLayout) -> int:
    """Count recomputed FLOPs by convention; products that a checkpoint skips only shorten the
    time."""
    head = priced.shapes.head_flops if priced.strategy.loss == "chunked" else 0
    return head + _recomputed_in_layers(priced)


def _recomputed_in_layers(priced: PricedLayout) -> int:
    """Count the recomputed FLOPs of the decoder layers.

    full: every decoder layer, or the first ones of each stage
    selective: scores and the attention module's projections; Megatron's scores alone; torch's by
        operator every second product (see uses_selective_op)
    """
    products, projections, scores = priced.shapes.decoder_flops
    scores *= priced.recipe.training.sequence_length
    if priced.checkpointed_activations is not None:
        return _recomputed_in_first_layers(priced)
    match priced.strategy.checkpointing:
        case "full":
            return products + scores
        case "selective" if not priced.traits.selective_recomputes_projections:
            return scores
        case "selective" if uses_selective_op(priced.graph, priced.kernels):
            whole = model_shapes(priced.graph, 1)
            dropped = [
                2 * sum(p.n * p.k for p in recomputed_products(kind.products))
                for kind in whole.kinds
            ]
            products = sum(dropped[kind] for kind in whole.kind_of if kind >= 0)
            is_eager = priced.graph.attention == "eager"
            return products + (
                scores if is_eager and not priced.kernels.fuses_attention_sinks else 0
            )
        case "selective":
            return projections + scores
        case tuple(modules):
            whole = model_shapes(priced.graph, 1)
            dropped = [recomputed_product_flops(kind, modules, 1) for kind in whole.kinds]
            products = sum(dropped[kind] for kind in whole.kind_of if kind >= 0)
            return products + (scores if "core_attn" in modules else 0)
        case _:
            return 0


def _recomputed_in_first_layers(priced: PricedLayout) -> int:
    length, blocks = (
        priced.recipe.training.sequence_length,
        itertools.chain.from_iterable(priced.ranks),
    )
    ends = [(block.start, priced.checkpointed_stop(block.start, block.stop)) for block in blocks]
    layers = itertools.chain.from_iterable(priced.graph.layers[start:stop] for start, stop in ends)
    return sum(
        x.matmul_flops_per_token + x.attention_flops_per_token_per_position * length
        for x in layers
        if x.kind == "decoder"
    )


def _unlike_ranks(priced: PricedLayout) -> Iterable[int]:
    """Yield one of the ranks whose data-parallel collectives are equal.

    Pipelines run at ZeRO 0 or 1, which reduce gradients after all passes, so only their number
    counts.
    """
    if priced.strategy.zero_stage > 1:
        return range(priced.strategy.pipeline)
    held = {
        (priced.trainable_numel_of(b), priced.expert_numel_of(b)): rank
        for rank, b in enumerate(priced.ranks)
    }
    return held.values()


def stage_seconds(priced: PricedLayout, rank: int, found: PassTimes) -> StageSeconds:
    s, blocks = priced.strategy, priced.ranks[rank]

    def over(sums: tuple[float, ...]) -> float:
        return sum([sums[block.stop] - sums[block.start] for block in blocks])

    recompute = partial_recompute_seconds(priced, found, blocks)
    # Sends and receives; interleaved schedules run both at once.
    waits = pipeline_sends(priced, rank) * (1 if s.is_interleaved else 2)
    return StageSeconds(
        compute=over(found.forward_compute)
        + over(found.backward_compute)
        + recompute[0]
        + found.per_rank_seconds,
        tensor_comm=over(found.forward_comm) + over(found.backward_comm) + recompute[1],
        pipeline_comm=waits * found.send_seconds,
    )


def data_parallel_seconds(priced: PricedLayout) -> float:
    """Return the data-parallel seconds of a step without a pipeline."""
    return data_comm_seconds(priced, 0, stage_seconds(priced, 0, pass_times(priced)))


def per_step_seconds_per_parameter(priced: PricedLayout) -> float:
    """Return the gradient collective and update of one parameter at ZeRO 0 or 1, without ring
    latency.

    This is a share of `data_comm_seconds` and `optimizer_seconds`.
    """
    s, numel = priced.strategy, max(1.0, priced.shapes.numel[-1] / priced.strategy.pipeline)
    return _reduced_seconds(
        priced, priced.group(s.zero_world_size, s.tensor), numel
    ) / numel + _update_seconds(priced, 1)


def least_once_a_step_seconds(priced: PricedLayout, layers: int = 0) -> float:
    """Return a lower bound of the gradient collectives and update on the largest rank at ZeRO 0 or
    1.

    It is a mean rank's, for any stage assignment. Experts that ranks shard are reduced over the
    ranks with the same ones.

    layers: decoder layers, all trained, that some rank has at least
    """
    s, shapes = priced.strategy, priced.shapes
    numel = (
        priced.adapter_sizes[-1] if priced.adapter_sizes else shapes.numel[-1] - shapes.shared_numel
    )
    numel -= priced.frozen[-1] if priced.frozen else 0
    spreads = s.shards_experts and not priced.has_frozen
    experts = shapes.expert_numel[-1] if spreads else 0
    held = [((numel - experts) / s.pipeline, experts / s.pipeline)]
    if layers:
        numels, expert_numel_of = (
            np.diff(each[1:-1]) for each in (shapes.numel, shapes.expert_numel)
        )
        shared = expert_numel_of * spreads
        held.append((layers * float((numels - shared).min()), layers * float(shared.min())))
    return max(_least_reduced_seconds(priced, *each) for each in held) + max(
        _update_seconds(priced, sum(each)) for each in held
    )


def _least_reduced_seconds(priced: PricedLayout, numel: float, experts: float) -> float:
    """Return the least reduction seconds; numel: without experts that ranks shard."""
    s = priced.strategy
    if s.zero_world_size == 1 and s.expert_replicas == 1:
        return 0.0
    seconds = _reduced_seconds(priced, priced.group(s.zero_world_size, s.tensor), numel)
    if experts:
        over = priced.group(s.expert_replicas, s.expert * s.expert_tensor_ranks)
        seconds += _reduced_seconds(priced, over, experts / s.expert_shard_ratio)
    return seconds


def _reduced_seconds(priced: PricedLayout, group: Group, numel: float) -> float:
    """Gradients of so many parameters over the group at ZeRO 0 or 1, without the starts of
    rings."""
    s, c, cluster = priced.strategy, priced.constants, priced.cluster
    gradient = element_bytes(priced.accumulation_dtype)
    if s.zero_stage == 0:
        return all_reduce_seconds(cluster, c, group, gradient * numel, 0)
    moved = gradient + priced.element_bytes
    return gather_seconds(cluster, c, group, moved * numel, 0) / zero_efficiency(priced)


def optimizer_seconds(priced: PricedLayout, rank: int) -> float:
    blocks = priced.ranks[rank]
    return (
        _optimizer_seconds(priced, priced.trainable_numel_of(blocks))
        + newton_schulz_seconds(priced, blocks)
        + _factor_seconds(priced, blocks)
    )


def _factor_seconds(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Return the seconds in which a stage's ranks sum up the rows and columns of squares."""
    s = priced.strategy
    ranks = s.zero_world_size * s.tensor
    if ranks == 1 or not priced.factors:
        return 0.0
    size = MASTER_BYTES * priced.factor_numel_of(blocks)
    return all_reduce_seconds(priced.cluster, priced.constants, priced.group(ranks, 1), size, 0)


def newton_schulz_seconds(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Return the seconds of Muon's Newton-Schulz iterations on a rank, and of gathering matrices.

    Ranks that share matrices share out the iterations. Megatron's ranks repeat those of all
    matrices that they hold.
    """
    flops, numel = priced.newton_schulz_flops_of(blocks), priced.matrix_numel_of(blocks)
    if not flops:
        return 0.0
    s, c = priced.strategy, priced.constants
    rate = peak_flops(priced.cluster.gpu, priced.recipe.training.precision) * c.gemm_efficiency
    gathered = gathered_matrix_numel(priced, blocks)
    if priced.traits.repeats_orthogonalization:
        held = numel - priced.expert_numel_of(blocks) * (1 - 1 / s.expert_shard_ratio)
        group, moved = priced.group(s.tensor, 1), gathered * MASTER_BYTES
        gather = gather_seconds(priced.cluster, c, group, moved, 0) if gathered else 0.0
        return flops * held / numel / rate + gather
    ranks = s.zero_world_size * s.tensor if s.zero_stage >= 1 or s.tensor > 1 else 1
    group, moved = priced.group(ranks, 1), gathered * priced.element_bytes
    shared = 2 * all_reduce_seconds(priced.cluster, c, group, moved, 0) if gathered else 0.0
    return flops / ranks / rate + shared


def _optimizer_seconds(priced: PricedLayout, numel: int) -> float:
    own = engine_overheads(priced.recipe, priced.graph, priced.strategy)
    once = own.step_seconds.value if own else 0.0
    return _update_seconds(priced, numel) + once


def _update_seconds(priced: PricedLayout, numel: float) -> float:
    if priced.strategy.offload != "none":
        return cpu_optimizer_seconds(priced, numel)
    updated = numel / (priced.strategy.zero_world_size if priced.strategy.zero_stage >= 1 else 1)
    if own := engine_overheads(priced.recipe, priced.graph, priced.strategy):
        return updated * own.parameter_seconds.value
    traffic = OPTIMIZERS[priced.recipe.training.optimizer.name].traffic
    return _traffic_seconds(priced, traffic * priced.constants.optimizer_traffic_bytes * updated)


def _traffic_seconds(priced: PricedLayout, moved_bytes: float) -> float:
    return moved_bytes / (
        priced.cluster.gpu.hbm_bytes_per_second * priced.constants.memory_efficiency
    )
