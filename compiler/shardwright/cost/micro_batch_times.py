"""Seconds of one micro-batch's forward and backward pass over any run of layers: their kernels and
collectives.

All of it adds up over the layers, so a stage of any partition is a difference of prefix sums.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calibrated_costs import host_overhead_seconds
from shardwright.cost.collective_seconds import all_reduce_seconds, gather_seconds, send_seconds
from shardwright.cost.communication_bytes import (
    context_exchange_bytes,
    hidden_state_bytes,
    layer_all_reduces,
)
from shardwright.cost.cost_constants import Constants
from shardwright.cost.expert_parallel_costs import expert_exchange_seconds
from shardwright.cost.layer_times import layer_seconds
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import ELEMENT_BYTES
from shardwright.utils.memoize import hashed_key, memoize

Floats = NDArray[np.float64]

# Of what a micro-batch costs beyond its layers; a backward pass is two forward passes.
FORWARD_SHARE = 1 / 3
# Of the host's launches around a collective: a backward pass launches two kernels for one of the
# forward pass.
LAUNCHED_FORWARD, LAUNCHED_BACKWARD = 2 / 3, 4 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Prefix sums over graph.layers (length layers + 1), seconds; backward includes what is run
    again, but for partial checkpointing: there again_* are what each decoder layer adds where it is
    among the recomputed (see partial_recompute_seconds).

    per_rank_seconds: compute beyond the layers, once a pipeline rank. send_seconds: one message
    over one boundary.
    """

    forward_compute: tuple[float, ...]
    backward_compute: tuple[float, ...]
    forward_comm: tuple[float, ...]
    backward_comm: tuple[float, ...]
    partial_recompute_compute: tuple[float, ...]
    partial_recompute_comm: tuple[float, ...]
    per_rank_seconds: float
    send_seconds: float
    is_host_bound: bool  # the host's launches bound a layer's forward pass, not the GPU


@hashed_key
def _pass_times_shared_key(problem: Problem, c: Constants) -> Hashable:
    r, cluster = problem.recipe, problem.cluster
    return (
        (cluster.nodes > 1, cluster.gpus_per_node, cluster.fabric, cluster.fabric_is_given),
        (cluster.intra_node_bytes_per_second, cluster.inter_node_bytes_per_second),
        (
            cluster.gpu.hbm_bytes_per_second,
            cluster.gpu.is_cpu,
            problem.graph.identity,
            r.training.sequence_length,
        ),
        (r.assume.kernels, r.assume.mfu is None),
        c,
    )


def _pass_times_key(layout: PricedLayout) -> Hashable:
    """But for where ranks stand, all that layers' seconds do."""
    s = layout.strategy
    return (
        _pass_times_shared_key(layout.problem, layout.constants),
        layer_seconds(layout.recipe, layout.graph, layout.cluster.gpu, s, layout.constants),
        (
            layout.element_bytes,
            layout.accumulation_dtype,
            layout.adapter_sizes,
            layout.frozen,
            layout.traits,
        ),
        # Where a tied tensor stands; nothing else of a layer's seconds is the schedule's.
        layout.shapes.shared_numel > 0 and s.schedule,
        (
            s.pipeline > 1,
            s.context,
            s.expert,
            s.tensor,
            s.micro_batch_size,
            s.shards * (s.expert > 1),
        ),
        s.expert_tensor,
        (s.checkpointing, layout.checkpointed_activations is None, s.sequence_parallel),
    )


def pass_times(layout: PricedLayout) -> PassTimes:
    """Of the layout's model and strategy, wherever its layers are placed. The same for each ZeRO
    stage, unless what the engine adds was measured."""
    return replace(
        _of_layers(layout),
        per_rank_seconds=micro_batch_overhead_seconds(layout),
        send_seconds=pipeline_send_seconds(layout),
    )


@memoize(_pass_times_key)
def _of_layers(layout: PricedLayout) -> PassTimes:
    s, c, gpu = layout.strategy, layout.constants, layout.cluster.gpu
    seconds = layer_seconds(layout.recipe, layout.graph, gpu, s, c)
    partly = np.zeros(len(layout.graph.layers))
    if layout.checkpointed_activations is not None:
        partly[1:-1] = _each(seconds.recompute)[
            1:-1
        ]  # the ends are never checkpointed; a chunked loss stays
    recompute = _each(seconds.recompute) - partly
    backward = _each(seconds.backward) + recompute
    if layout.recipe.assume.mfu is None:
        backward = backward + _accumulation_seconds(layout)
    forward_comm, backward_comm, partial_recompute_comm = _tensor_comm_seconds(
        layout, _each(seconds.forward), backward, partly
    )
    is_floor = s.tensor > 1 and layout.traits.tensor_parallel_launch_cost == "floor"
    launches = 2 * LAUNCHED_FORWARD * _collective_launch_seconds(layout) if is_floor else 0.0
    # The host is the bound where a layer is as long as its launches.
    is_host_bound = bool(
        len(forward_comm) > 2
        and forward_comm[1] + _each(seconds.forward)[1] <= launches * (1 + 1e-9)
    )
    if s.context > 1 or s.expert > 1:
        exchange = np.array(
            [
                _context_exchange_seconds(layout) * (layer.kind == "decoder")
                for layer in layout.graph.layers
            ]
        )
        rows = np.array(expert_exchange_seconds(layout))
        partial = layout.checkpointed_activations is not None
        repeated = not partial and s.checkpointing != "none"
        whole = not partial and s.checkpointing == "full"  # the attention module has no experts
        forward_comm += exchange + rows
        backward_comm += (1 + repeated) * exchange + (1 + whole) * rows
        partial_recompute_comm += (exchange + rows) * partial
    return PassTimes(
        forward_compute=seconds.forward,
        backward_compute=_sums(backward),
        forward_comm=_sums(forward_comm),
        backward_comm=_sums(backward_comm),
        partial_recompute_compute=_sums(partly),
        partial_recompute_comm=_sums(partial_recompute_comm),
        per_rank_seconds=0.0,
        send_seconds=0.0,
        is_host_bound=is_host_bound,
    )


def micro_batch_overhead_seconds(layout: PricedLayout) -> float:
    """Beyond the layers, of a micro-batch on a pipeline rank."""
    if layout.recipe.assume.mfu is not None:
        return 0.0
    otherwise = 0.0 if layout.cluster.gpu.is_cpu else layout.constants.micro_batch_seconds
    return host_overhead_seconds(layout.recipe, layout.graph, layout.strategy, otherwise)


def _each(sums: tuple[float, ...] | tuple[int, ...]) -> Floats:
    return np.diff(np.array(sums, dtype=np.float64))


def _sums(values: Floats) -> tuple[float, ...]:
    return (0.0, *np.cumsum(values).tolist())


def _accumulation_seconds(layout: PricedLayout) -> Floats:
    """Each micro-batch's gradient is read and added to the accumulated one, in its own type."""
    s = layout.strategy
    numel = _each(layout.adapter_sizes or layout.shapes.numel)
    if layout.traits.fuses_accumulation:
        return np.zeros(len(numel))
    if layout.frozen:
        numel -= _each(layout.frozen)
    if s.shards_experts:
        numel -= _each(layout.shapes.expert_numel) * (1 - 1 / s.expert_shard_ratio)
    if not layout.adapter_sizes and (
        layout.strategy.pipeline == 1 or layout.strategy.schedule == "dualpipev"
    ):
        numel[-1] -= (
            layout.shapes.shared_numel
        )  # the embedding is on the head's rank, and a tied tensor there is one
    moved = layout.element_bytes + 2 * ELEMENT_BYTES[layout.accumulation_dtype]
    rate = layout.cluster.gpu.hbm_bytes_per_second * layout.constants.memory_efficiency
    return moved * numel / rate


def _tensor_comm_seconds(
    layout: PricedLayout,
    ahead_compute: Floats,
    back_compute: Floats,
    partial_recompute_compute: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Per decoder layer, forward, backward, and backward where partial checkpointing recomputes it:
    all-reduces (see traffic.layer_all_reduces), and the gathers of the linears whose output is
    whole. The embedding reduces its rows forward, the head its input's gradient backward. The rest:
    seconds of each layer's compute, beside which the host launches (see
    _collective_launch_seconds).
    """
    s, c, cluster, shapes = layout.strategy, layout.constants, layout.cluster, layout.shapes
    layers = len(layout.graph.layers)
    if s.tensor == 1:
        return np.zeros(layers), np.zeros(layers), np.zeros(layers)
    group, message = layout.group(s.tensor, 1), layout.tokens * layout.element_bytes
    reduce = all_reduce_seconds(cluster, c, group, message * layout.graph.hidden_size)
    ahead, recompute = layer_all_reduces(layout)
    partly = 0 if layout.checkpointed_activations is None else recompute
    back = ahead + recompute - partly
    features, gathers = _each(shapes.gathered_features), _each(shapes.gathered_products)
    moved = np.zeros(layers)
    if features.any():
        # The output gathered forward, the input's gradient reduced backward: half of both each.
        seconds_of = functools.cache(
            lambda f, n: gather_seconds(cluster, c, group, f * message / 2, n)
        )
        moved = np.array(list(map(seconds_of, features.tolist(), map(int, gathers.tolist()))))
    host, added = (
        _collective_launch_seconds(layout),
        layout.traits.tensor_parallel_launch_cost == "added",
    )

    def idle(launched: Floats, collectives: Floats, moved: Floats, compute: Floats) -> Floats:
        """Of each layer: how long the GPU waits for the host's launches, which bound both from
        below, or are added."""
        return collectives * host if added else np.maximum(0.0, launched * host - moved - compute)

    again_launched, launched = np.full(layers, float(partly)), ahead + gathers
    forward = ahead * reduce + moved
    forward += idle(LAUNCHED_FORWARD * launched, launched, forward, ahead_compute)
    backward = back * reduce + moved
    launched_back = LAUNCHED_BACKWARD * launched + LAUNCHED_FORWARD * (back - ahead)
    backward += idle(launched_back, back + gathers, backward, back_compute)
    parts = partly * reduce + np.zeros(layers)
    parts += idle(
        LAUNCHED_FORWARD * again_launched, again_launched, parts, partial_recompute_compute
    )
    ends = reduce + (host if added else 0.0)
    forward[0], forward[-1] = ends, 0.0
    backward[0], backward[-1] = 0.0, ends
    parts[0] = parts[-1] = 0.0
    return forward, backward, parts


def _collective_launch_seconds(layout: PricedLayout) -> float:
    """The host's seconds for the launches around one tensor-parallel collective."""
    c, s, cluster = layout.constants, layout.strategy, layout.cluster
    if layout.traits.tensor_parallel_launch_cost == "hidden" or cluster.gpu.is_cpu:
        return 0.0
    crossing = s.pipeline > 1 and cluster.nodes > 1 and layout.traits.pipeline_raises_launch_cost
    return c.collective_host_seconds + (c.pipeline_host_seconds * s.tensor if crossing else 0.0)


def partial_recompute_seconds(
    layout: PricedLayout, found: PassTimes, blocks: Iterable[ModelChunk]
) -> tuple[float, float]:
    """Compute and collectives of a micro-batch's backward pass that partial checkpointing adds on
    these stages."""
    ends = [(block.start, layout.checkpointed_stop(block.start, block.stop)) for block in blocks]

    def over(sums: tuple[float, ...]) -> float:
        return sum(sums[stop] - sums[start] for start, stop in ends)

    return over(found.partial_recompute_compute), over(found.partial_recompute_comm)


def _context_exchange_seconds(layout: PricedLayout) -> float:
    """Context ranks trade tokens for heads around each layer's attention (arXiv 2309.14509):
    queries and output, keys and values, each of which leaves (s - 1) / s of itself. Keys' heads
    that s does not divide are repeated. The same backward, and again where attention is recomputed.
    Or they gather keys and values of the whole row, and reduce their gradients (arXiv 2407.21783,
    3.3.2)."""
    s = layout.strategy
    if s.context == 1:
        return 0.0
    group = layout.group(s.context, s.tensor)
    calls = 2 if layout.traits.context_gathers_kv else 4
    return gather_seconds(
        layout.cluster, layout.constants, group, context_exchange_bytes(layout), calls
    )


def pipeline_send_seconds(layout: PricedLayout) -> float:
    """An activation or a gradient to the neighbour, which is data x context x tensor ranks away.
    DeepSpeed (pipe_partitioned) and Megatron (scatter-gather, arXiv 2104.04473) send a share from
    each tensor rank and gather it there; DualPipeV sends the whole. Megatron sends both ways at
    once, DeepSpeed one after the other."""
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    if s.pipeline == 1:
        return 0.0
    message = hidden_state_bytes(layout)
    share = 1 if s.schedule == "dualpipev" else s.tensor
    seconds = send_seconds(cluster, c, s.tensor * s.shards, message / share)
    if share > 1 and not s.sequence_parallel:
        seconds += gather_seconds(cluster, c, layout.group(s.tensor, 1), message)
    return seconds / 2 if layout.traits.bidirectional_p2p and s.virtual_stages == 1 else seconds
