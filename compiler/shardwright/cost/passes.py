"""Seconds of one micro-batch's forward and backward pass over any run of layers: their kernels and collectives.

All of it adds up over the layers, so a stage of any partition is a difference of prefix sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from shardwright.cost.collectives import all_reduce_seconds, gather_seconds, group_of, send_seconds
from shardwright.cost.compute import layer_seconds, stops_early
from shardwright.cost.layout import Layout
from shardwright.ir.recipe import ELEMENT_BYTES
from shardwright.remembered import remembered

# Of what a micro-batch costs beyond its layers; a backward pass is two forward passes.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Prefix sums over graph.layers (length layers + 1), seconds; backward includes what is run again.

    per_rank_seconds: compute beyond the layers, once a pipeline rank. send_seconds: one message over one boundary.
    """

    forward_compute: tuple[float, ...]
    backward_compute: tuple[float, ...]
    forward_comm: tuple[float, ...]
    backward_comm: tuple[float, ...]
    per_rank_seconds: float
    send_seconds: float


def _depends_on(layout: Layout) -> Hashable:
    s, r, cluster = layout.strategy, layout.recipe, layout.cluster
    return (
        layer_seconds(r, layout.graph, cluster.gpu, s, layout.constants),
        (cluster.gpus_per_node, cluster.intra_node_bytes_per_second, cluster.inter_node_bytes_per_second),
        (cluster.gpu.hbm_bytes_per_second, cluster.gpu.is_cpu, layout.graph.identity, r.training.sequence_length),
        (layout.element_bytes, layout.accumulation_dtype, layout.adapters),
        (layout.traits, r.assume.kernels, r.assume.mfu is None),
        (s.schedule, s.pipeline, s.data, s.tensor, s.micro_batch_size),
        (s.activation_checkpointing, s.sequence_parallel, s.virtual_stages),
        layout.constants,
    )


@remembered(_depends_on)
def passes(layout: Layout) -> Passes:
    """Of the layout's model and strategy, wherever its layers are placed. The same for each ZeRO stage."""
    s, c, gpu = layout.strategy, layout.constants, layout.cluster.gpu
    seconds = layer_seconds(layout.recipe, layout.graph, gpu, s, c)
    backward = [b + again for b, again in zip(_each(seconds.backward), _each(seconds.again), strict=True)]
    per_rank = 0.0
    if layout.recipe.assume.mfu is None:
        backward = [b + added for b, added in zip(backward, _accumulation_seconds(layout), strict=True)]
        per_rank = 0.0 if gpu.is_cpu else c.micro_batch_seconds
    forward_comm, backward_comm = _tensor_comm_seconds(layout)
    return Passes(
        forward_compute=seconds.forward,
        backward_compute=_sums(backward),
        forward_comm=_sums(forward_comm),
        backward_comm=_sums(backward_comm),
        per_rank_seconds=per_rank,
        send_seconds=_message_seconds(layout),
    )


def _each(sums: tuple[float, ...] | tuple[int, ...]) -> list[float]:
    return [stop - start for start, stop in itertools.pairwise(sums)]


def _sums(values: list[float]) -> tuple[float, ...]:
    return tuple(itertools.accumulate(values, initial=0.0))


def _accumulation_seconds(layout: Layout) -> list[float]:
    """Each micro-batch's gradient is read and added to the accumulated one, in its own type."""
    numel = _each(layout.adapters or layout.shapes.numel)
    if layout.traits.fuses_accumulation:
        return [0.0] * len(numel)
    if not layout.adapters and (layout.strategy.pipeline == 1 or layout.strategy.schedule == "dualpipev"):
        numel[-1] -= layout.shapes.shared_numel  # the embedding is on the head's rank, and a tied tensor there is one
    moved = layout.element_bytes + 2 * ELEMENT_BYTES[layout.accumulation_dtype]
    rate = layout.cluster.gpu.hbm_bytes_per_second * layout.constants.memory_efficiency
    return [moved * n / rate for n in numel]


def _tensor_comm_seconds(layout: Layout) -> tuple[list[float], list[float]]:
    """Per decoder layer, forward and backward: an all-reduce for each half whose features are cut (arXiv 1909.08053),
    those that recomputation repeats (the attention module has one, Megatron's "selective" none), and the gathers of
    the linears whose output is whole. The embedding reduces its rows forward, the head its input's gradient backward.
    """
    s, c, cluster, shapes = layout.strategy, layout.constants, layout.cluster, layout.shapes
    layers = len(layout.graph.layers)
    if s.tensor == 1:
        return [0.0] * layers, [0.0] * layers
    group, message = group_of(cluster, s.tensor, 1), layout.tokens * layout.element_bytes
    shown = layout.traits.drains_launches and not cluster.gpu.is_cpu
    host = c.collective_host_seconds if shown else 0.0
    reduce = all_reduce_seconds(cluster, c, group, message * layout.graph.hidden_size) + host
    attention, feed_forward = shapes.attention_degree > 1, shapes.feed_forward_degree > 1
    again_attention, again_feed_forward = {"none": (0, 0), "selective": (1, 0), "full": (1, 1)}[
        s.activation_checkpointing
    ]
    if s.activation_checkpointing == "selective" and not layout.traits.selective_repeats_projections:
        again_attention = 0
    elif stops_early(layout.graph, layout.recipe.assume.kernels):  # the last product's reduction is left out with it
        again_attention, again_feed_forward = {"none": (0, 0), "selective": (0, 0), "full": (1, 0)}[
            s.activation_checkpointing
        ]
    ahead = (attention + feed_forward) * reduce
    back = ahead + (again_attention * attention + again_feed_forward * feed_forward) * reduce
    # The output gathered forward, the input's gradient reduced backward: half of both each.
    gathered = list(zip(_each(shapes.gathered_features), _each(shapes.gathered_products), strict=True))
    seconds_of = {
        (features, products): gather_seconds(cluster, c, group, features * message / 2, products) + products * host
        for features, products in set(gathered)
    }
    gathers = [seconds_of[pair] for pair in gathered]
    forward = [reduce, *(ahead + g for g in gathers[1:-1]), 0.0]
    backward = [0.0, *(back + g for g in gathers[1:-1]), reduce]
    return forward, backward


def _message_seconds(layout: Layout) -> float:
    """An activation or a gradient to the neighbour, which is data x tensor ranks away. DeepSpeed (pipe_partitioned) and
    Megatron (scatter-gather, arXiv 2104.04473) send a share from each tensor rank and gather it there; DualPipeV sends
    the whole. Megatron sends both ways at once, DeepSpeed one after the other."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    if s.pipeline == 1:
        return 0.0
    message = layout.tokens * layout.graph.hidden_size * layout.element_bytes
    share = 1 if s.schedule == "dualpipev" else s.tensor
    seconds = send_seconds(cluster, c, s.tensor * s.data, message / share)
    if share > 1 and not s.sequence_parallel:
        seconds += gather_seconds(cluster, c, group_of(cluster, s.tensor, 1), message)
    return seconds / 2 if layout.traits.duplex_sends and s.virtual_stages == 1 else seconds
