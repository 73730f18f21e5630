"""Exposed time of the data-parallel collectives of one step, behind the compute of one micro-batch.

How much hides, and what buckets reach of the links, are traits of whose engine runs
(engines/engine_table.py).
"""

from __future__ import annotations

from shardwright.cost.collective_seconds import (
    Group,
    all_reduce_seconds,
    gather_seconds,
    reduce_scatter_seconds,
    ring_start_seconds,
    send_seconds,
)
from shardwright.cost.communication_bytes import gradient_reduction
from shardwright.cost.micro_batch_times import FORWARD_SHARE
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.zero3_gathers import backward_gather_fraction
from shardwright.layout.zero_buckets import BUCKET_NUMEL, PREFETCH_NUMEL
from shardwright.recipe.recipe_types import ELEMENT_BYTES


def data_comm_seconds(layout: PricedLayout, rank: int, compute_seconds: float) -> float:
    """ZeRO 0 and 1: gradients once a step, reduced and gathered again, behind the last backward
    pass where no pipeline drains there. ZeRO-2 reduces at every micro-batch, ZeRO-3 gathers too."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    tied = _tied_seconds(layout)
    if s.shards == 1 and s.expert_replicas == 1:
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
    found = [(numel - experts, layout.group(s.shards, s.tensor))]
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
    group = layout.group(s.shards, s.tensor)
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
    if s.pipeline == 1 or s.schedule == "dualpipev" or not layout.shapes.shared_numel:
        return 0.0
    size = layout.shapes.shared_numel * ELEMENT_BYTES[layout.accumulation_dtype]
    distance = s.tensor * s.shards * (s.pipeline - 1)
    return send_seconds(layout.cluster, layout.constants, distance, size)
