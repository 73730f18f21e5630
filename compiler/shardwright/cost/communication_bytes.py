"""Count the bytes of a step's collectives and how often they run.

layer_times.py and step_time.py turn these counts into seconds; tests/parity/bytes compares them
with those of real runs. A buffer counts with all its bytes, those that stay on its rank included: a
ring over n ranks moves (n - 1) / n of it. Collectives with at most one number a token do not count:
the sharded cross-entropy's maximum and sum, losses, norms and an expert's token counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.cost.collective_seconds import (
    all_to_all_seconds,
    deduplicated_all_to_all_seconds,
    distinct_places,
    gather_seconds,
)
from shardwright.cost.layer_shapes import LayerShape, recompute_stops_early
from shardwright.cost.muon_traffic import matrix_gather_bytes
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.layout.formats import element_bytes
from shardwright.layout.zero_settings import LIVE_NUMEL
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.memoize import memoize


# Weights that ZeRO-3 leaves gathered on a rank. DeepSpeed releases a module's weights unless they
# are used again before LIVE_NUMEL elements of others are
# (zero/partitioned_param_coordinator.py, __params_to_release; stage3_max_reuse_distance). So the
# last layers stay gathered from their forward to their backward pass, and so does the end of a
# layer that is recomputed.
class UnshardedWeights(NamedTuple):
    """Count elements that ZeRO-3 gathers on a rank.

    regathered: gathered once more between a micro-batch's forward and backward pass
    resident: still gathered when the forward pass ends
    """

    regathered: float
    resident: float


def regathered_fraction(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Return how often a micro-batch gathers a pipeline rank's mean parameter after its first
    forward pass, which gathers all of them.

    The backward pass gathers what was released. A forward-only pass leaves the other parameters for
    the next forward pass, so it adds one more gather of the released ones. PyTorch's FSDP gathers
    all parameters for each pass.
    """
    passes = priced.recipe.training.objective.traits.forward_only_passes
    if priced.traits.zero3_gathers_flat_layers:
        return 1.0 + passes
    held = priced.numel_of_chunks(blocks) - priced.expert_numel_of(blocks) * (
        1 - 1 / priced.strategy.expert
    )
    weights = unsharded_weights(priced, blocks)
    gathered = weights.regathered + passes * (held - weights.resident)
    return gathered / held if held else 0.0


def _unsharded_weights_key(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> Hashable:
    spans = [(b.start, b.stop, _recomputed_until(priced, b)) for b in blocks]
    return priced.graph.identity, priced.strategy.tensor, priced.strategy.expert, LIVE_NUMEL, *spans


@memoize(_unsharded_weights_key)
def unsharded_weights(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> UnshardedWeights:
    """Count the weights that stay gathered or are gathered twice in a micro-batch."""
    regathered = resident = 0.0
    between = 0.0  # elements used between a layer's forward pass and its next use
    for block in reversed(blocks):
        until = _recomputed_until(priced, block)
        for at in reversed(range(block.start, block.stop)):
            modules = _modules(priced, blocks, at)
            own, behind, recomputed = (
                sum(modules),
                0.0,
                priced.shapes.kind_of[at] >= 0 and at < until,
            )
            for numel in reversed(modules):
                # From a module's forward pass to its recomputation, the rest of the layer is used.
                released = between + (own - numel if recomputed else 2 * behind) >= LIVE_NUMEL
                resident += numel * (not released)
                # The last module stays gathered: recomputation ends inside it.
                regathered += numel * (
                    released + (recomputed and behind > 0 and 2 * behind >= LIVE_NUMEL)
                )
                behind += numel
            between += (3 if recomputed else 2) * own
    return UnshardedWeights(regathered, resident)


def _recomputed_until(priced: PricedLayout, block: ModelChunk) -> int:
    if priced.checkpointed_activations is not None:
        return priced.checkpointed_stop(block.start, block.stop)
    return block.stop if priced.strategy.checkpointing == "full" else block.start


def _modules(priced: PricedLayout, blocks: tuple[ModelChunk, ...], at: int) -> list[float]:
    """Return the elements of a layer's matrices on a device, in order; experts are one module.

    The first matrix includes the rest of the layer's parameters.
    """
    shapes, expert = priced.shapes, priced.strategy.expert
    numel = float(shapes.numel[at + 1] - shapes.numel[at])
    if shapes.kind_of[at] < 0:
        tied = at == 0 and priced.has_head(blocks)  # gathered with the head
        return [numel - shapes.shared_numel * tied]
    kind = shapes.kinds[shapes.kind_of[at]]
    sizes = [float(p.n * p.k) for p in kind.products if p.batch == 1]
    if kind.expert_numel:
        sizes.append(kind.expert_numel / expert)
    rest = numel - kind.expert_numel * (1 - 1 / expert) - sum(sizes)
    return [sizes[0] + rest, *sizes[1:]] if sizes else [rest]


# Expert parallelism: dispatch, combine and load imbalance. A routed token's hidden state goes to
# the rank of each chosen expert and comes back: 2 b S k H elements a layer forward, of which
# (e - 1) / e leave the rank, and as many backward; every tensor rank sends all of it.
# b: micro-batch, S: tokens of a sequence on a rank, H: hidden size, k: chosen experts, e: expert
# ranks.
EXPERT_IMBALANCE = 1.25
"""Gives the busiest expert rank's tokens over the mean where assume.expert_imbalance is auto. No
token is dropped, so there is no bound. Routers trained with a balance loss stay near the mean,
which estimates assume; twice the mean is possible early in training."""


def expert_imbalance(recipe: Recipe) -> float:
    """Return the busiest expert rank's tokens over the mean."""
    return recipe.assume.expert_imbalance or EXPERT_IMBALANCE


def _reachable_share(priced: PricedLayout) -> float:
    """Return the share of the experts that one token's experts are chosen from: those of its best
    groups (`topk_group` of `n_group`)."""
    groups, chosen = (priced.graph.config.get(key) for key in ("n_group", "topk_group"))
    if not isinstance(groups, int) or not isinstance(chosen, int) or not 0 < chosen <= groups:
        return 1.0
    return chosen / groups


def has_deepep(priced: PricedLayout) -> bool:
    """Return whether a token is sent once to each node and rank with any of its experts."""
    return priced.kernels.uses_deepep or priced.strategy.expert_dispatcher == "deepep"


def expert_exchange_seconds(priced: PricedLayout) -> list[float]:
    """Return each layer's forward seconds for token counts, dispatch and combine; backward takes
    as long."""
    s, cluster = priced.strategy, priced.cluster
    if s.expert == 1:
        return [0.0] * len(priced.graph.layers)
    # Under sequence parallelism each tensor rank sends its own tokens. Ranks that share an expert's
    # shards gather the tokens first and reduce-scatter the outputs
    # (megatron/core/transformer/moe/token_dispatcher.py).
    share = s.tensor if s.sequence_parallel else 1
    group, c = priced.group(s.expert, s.expert_tensor_ranks), priced.constants
    exposed = 1 - c.expert_overlap_share * s.overlapped_share
    gathers = share > 1 and s.expert_tensor_ranks > 1
    reachable = _reachable_share(priced)

    def layer_seconds(kind: LayerShape) -> float:
        sent = expert_imbalance(priced.recipe) * 2 * routed_token_bytes(priced, kind) / share
        if has_deepep(priced):
            exchange = deduplicated_all_to_all_seconds(
                cluster, c, group, sent, kind.experts_per_token, reachable
            )
        else:
            exchange = all_to_all_seconds(cluster, c, group, sent, 3, c.expert_alltoall_efficiency)
        exchange *= exposed
        if not gathers:
            return exchange
        expert_tensor_group = priced.group(s.expert_tensor_ranks, 1)
        return exchange + gather_seconds(cluster, c, expert_tensor_group, sent * share, 2)

    seconds = [
        layer_seconds(kind) if kind.experts_per_token else 0.0 for kind in priced.shapes.kinds
    ]
    return [0.0 if kind < 0 else seconds[kind] for kind in priced.shapes.kind_of]


def routed_token_bytes(priced: PricedLayout, kind: LayerShape) -> float:
    """Return the hidden states of one micro-batch, with a copy for each chosen expert."""
    return priced.tokens * kind.experts_per_token * priced.graph.hidden_size * priced.element_bytes


def _sent_token_bytes(priced: PricedLayout, kind: LayerShape) -> float:
    """Return the hidden states that a rank hands to the dispatcher for one micro-batch; DeepEP
    sends one to each rank with any of a token's experts, as far as its router's groups reach."""
    sent, experts = routed_token_bytes(priced, kind), kind.experts_per_token
    if not (experts and has_deepep(priced)):
        return sent
    ranks = priced.strategy.expert * priced.strategy.expert_tensor_ranks
    return sent * distinct_places(ranks, experts, _reachable_share(priced)) / experts


def imbalance_bytes(priced: PricedLayout, kind: LayerShape) -> float:
    """Return a layer's saved bytes on the busiest rank beyond its saved bytes without expert
    parallelism.

    Counts inputs and inner features of the tokens beyond the mean. The layer's own activations
    already hold the received tokens, which are the experts' inputs, and the returned ones, which
    are their weighted outputs. An all-to-all saves nothing for its backward pass.
    """
    s = priced.strategy
    if s.expert == 1 or not kind.experts_per_token:
        return 0.0
    inner = priced.tokens * kind.experts_per_token * kind.expert_features * priced.element_bytes
    return (expert_imbalance(priced.recipe) - 1) * (routed_token_bytes(priced, kind) + inner)


def dispatch_buffer_bytes(priced: PricedLayout, kind: LayerShape) -> float:
    """Return the bytes of an all-to-all's input, which is in memory together with its output."""
    return (
        routed_token_bytes(priced, kind)
        if priced.strategy.expert > 1 and kind.experts_per_token
        else 0.0
    )


class LayerAllReduces(NamedTuple):
    """Count the tensor-parallel all-reduces of a decoder layer.

    forward: in the forward pass; the backward pass has as many
    recompute: repeated by recomputation
    """

    forward: int
    recompute: int


def layer_all_reduces(priced: PricedLayout) -> LayerAllReduces:
    """Count one all-reduce for each sharded half of a layer (arXiv 1909.08053).

    The attention module has one of them. Megatron's "selective" repeats none.
    """
    s, shapes = priced.strategy, priced.shapes
    if s.tensor == 1:
        return LayerAllReduces(0, 0)
    attention, feed_forward = shapes.attention_degree > 1, shapes.feed_forward_degree > 1
    recomputed = {"none": (0, 0), "selective": (1, 0), "full": (1, 1)}
    if s.checkpointing == "selective" and not priced.traits.selective_recomputes_projections:
        recomputed = {"selective": (0, 0)}
    elif recompute_stops_early(priced.graph, priced.kernels):
        # The last product's all-reduce is skipped together with the product.
        recomputed = {"none": (0, 0), "selective": (0, 0), "full": (1, 0)}
    # Modules repeat none but the feed-forward network's (see repeats_feed_forward_reduce).
    recomputed_attention, recomputed_feed_forward = recomputed.get(str(s.checkpointing), (0, 0))
    return LayerAllReduces(
        attention + feed_forward,
        recomputed_attention * attention + recomputed_feed_forward * feed_forward,
    )


def repeats_feed_forward_reduce(priced: PricedLayout, kind: LayerShape) -> bool:
    """Return whether recompute_modules repeat the all-reduce of a layer's feed-forward network."""
    modules = priced.strategy.checkpointing
    if not isinstance(modules, tuple) or priced.shapes.feed_forward_degree == 1:
        return False
    return ("moe" if kind.experts_per_token else "mlp") in modules


def hidden_state_bytes(priced: PricedLayout) -> int:
    """Return the bytes of a micro-batch's hidden states on one rank."""
    return priced.tokens * priced.graph.hidden_size * priced.element_bytes


def context_exchange_bytes(priced: PricedLayout) -> float:
    """Return the bytes of a layer's four all-to-alls around attention in the forward pass.

    They carry queries and output, keys and values. Key heads that the context ranks do not divide
    are repeated. Megatron gathers the keys and values of the whole sequence instead.
    """
    graph, degree, s = priced.graph, priced.shapes.attention_degree, priced.strategy
    if priced.traits.context_gathers_kv:
        kv_bytes = (
            2 * max(1, graph.key_value_heads // degree) * graph.head_dim * priced.element_bytes
        )
        return s.context * priced.tokens * kv_bytes
    key_value_heads = math.lcm(max(1, graph.key_value_heads // degree), s.context)
    heads = 2 * graph.attention_heads / degree + 2 * key_value_heads
    return priced.tokens * heads * graph.head_dim * priced.element_bytes


def pipeline_sends(priced: PricedLayout, rank: int) -> int:
    """Return a pipeline rank's sends for a micro-batch, activations and gradients; as many arrive.

    DualPipeV passes through the ranks twice. Under interleaving every virtual stage has both
    neighbours.
    """
    s = priced.strategy
    if s.pipeline == 1:
        return 0
    if s.is_interleaved:
        return 2 * s.virtual_stages
    neighbours = (rank > 0) + (rank < s.pipeline - 1)
    return neighbours * s.pipeline_schedule.stages_per_rank


def _forward_sends(priced: PricedLayout, rank: int) -> int:
    """Return a pipeline rank's sends in the forward pass of a micro-batch."""
    s = priced.strategy
    if s.pipeline_schedule.is_v_shaped or s.is_interleaved:
        return pipeline_sends(priced, rank) // 2
    return int(rank < s.pipeline - 1)


class GradientReduction(NamedTuple):
    """Describe a step's gradient reductions over the ranks with the same parameters.

    times: reductions in a step
    element_bytes: bytes of an element
    """

    times: int
    element_bytes: int


def gradient_reduction(priced: PricedLayout) -> GradientReduction:
    """Return the reductions of a step's gradients.

    ZeRO-2 and 3 do not keep gradients of other ranks' parameters, so they reduce each micro-batch
    (arXiv 1910.02054).
    """
    s = priced.strategy
    if s.zero_stage >= 2:
        return GradientReduction(s.gradient_accumulation_steps, priced.element_bytes)
    return GradientReduction(1, element_bytes(priced.accumulation_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Count the bytes of a step on one device of a pipeline rank.

    expert_all_to_all: tokens to the ranks of their experts and back, on the mean rank of an expert
        group
    context_all_to_all: tokens for heads around attention
    tensor_all_reduce: activations that tensor ranks reduce
    tensor_all_gather: outputs and pipeline messages that tensor ranks gather
    pipeline_send: messages between pipeline ranks, or a tensor rank's share of them
    tied_all_reduce: the gradient of a tensor on the first and the last pipeline rank
    gradient_reduce: gradients over data ranks
    parameter_all_gather: parameters over data ranks
    muon_matrices: Muon's matrices, gathered and shared out
    """

    expert_all_to_all: float
    context_all_to_all: float
    tensor_all_reduce: float
    tensor_all_gather: float
    pipeline_send: float
    tied_all_reduce: float
    gradient_reduce: float
    parameter_all_gather: float
    muon_matrices: float = 0.0


def step_traffic(priced: PricedLayout, rank: int) -> StepTraffic:
    """Count the traffic of a rank of a layout whose layers are assigned to stages.

    hpZ's gathers count as ZeRO-3's, though most of them stay inside a node.
    """
    s, blocks, shapes = priced.strategy, priced.ranks[rank], priced.shapes
    m, partial = s.gradient_accumulation_steps, priced.checkpointed_activations is not None
    forwards = 1 + priced.recipe.training.objective.traits.forward_only_passes

    def shapes_of(spans: list[tuple[int, int]]) -> list[LayerShape]:
        kinds = [kind for start, stop in spans for kind in shapes.kind_of[start:stop]]
        return [shapes.kinds[kind] for kind in kinds if kind >= 0]

    layers = shapes_of([(b.start, b.stop) for b in blocks])
    recomputed = layers if s.checkpointing != "none" else []
    if partial:
        recomputed = shapes_of(
            [(b.start, priced.checkpointed_stop(b.start, b.stop)) for b in blocks]
        )
    reductions, hidden = layer_all_reduces(priced), hidden_state_bytes(priced)
    # All-reduces outside the layers: the embedding's output and the head's gradient.
    ends = forwards * (blocks[0].start == 0) + priced.has_head(blocks)
    # An activation and a gradient that arrive in shares are gathered, and so is DeepSpeed's own
    # output, of which it keeps a share until its backward pass (pipe/engine.py,
    # _exec_backward_pass).
    gathers = 0
    if s.message_shards > 1 and s.pipeline > 1 and not s.sequence_parallel:
        gathers = forwards * (rank > 0) + 2 * (rank < s.pipeline - 1)
    tied = 0.0
    if not s.ends_share_rank and rank in (0, s.pipeline - 1):
        tied = float(shapes.shared_numel * element_bytes(priced.accumulation_dtype))
    inputs = sum((kind.gathered_features - kind.gathered_outputs) // 2 for kind in layers)
    outputs = forwards * sum(kind.gathered_outputs for kind in layers)
    repeated = sum(repeats_feed_forward_reduce(priced, kind) for kind in layers)
    count, sends = (
        len(layers) * (forwards + 1) * reductions.forward
        + len(recomputed) * reductions.recompute
        + repeated
        + ends,
        pipeline_sends(priced, rank) + (forwards - 1) * _forward_sends(priced, rank),
    )
    shares = s.message_shards
    passes = layers * (forwards + 1)
    dispatched = [*passes, *(recomputed if s.recomputes_experts else [])]
    attended = [*passes, *(recomputed if s.recomputes_attention else [])]
    sharers = s.tensor if s.sequence_parallel else 1
    return StepTraffic(
        expert_all_to_all=m
        * sum(2 * _sent_token_bytes(priced, kind) for kind in dispatched)
        / sharers
        if s.expert > 1
        else 0.0,
        context_all_to_all=m * len(attended) * context_exchange_bytes(priced)
        if s.context > 1
        else 0.0,
        tensor_all_reduce=m * (count * hidden + inputs * priced.tokens * priced.element_bytes)
        if s.tensor > 1
        else 0.0,
        tensor_all_gather=m * (gathers * hidden + outputs * priced.tokens * priced.element_bytes),
        pipeline_send=m * sends * hidden / shares,
        tied_all_reduce=tied,
        muon_matrices=matrix_gather_bytes(priced, rank),
        **_data_parallel_bytes(priced, rank),
    )


def _data_parallel_bytes(priced: PricedLayout, rank: int) -> dict[str, float]:
    s = priced.strategy
    blocks = priced.ranks[rank]
    experts, trained = priced.expert_numel_of(blocks), priced.trainable_numel_of(blocks)
    reduced = gathered = 0.0
    times, gradient = gradient_reduction(priced)
    gathers, held = float(s.zero_stage > 0), trained
    if s.zero_stage == 3 and s.zero_world_size > 1:
        gathers, held = (
            s.gradient_accumulation_steps * (1 + regathered_fraction(priced, blocks)),
            priced.numel(rank),
        )
    own = experts / s.expert_shard_ratio
    for of_trained, of_held, ranks in (
        (trained - experts, held - experts, s.zero_world_size),
        (own, own, s.expert_replicas),  # over the ranks that hold the same experts
    ):
        if ranks > 1:
            reduced += times * gradient * of_trained
            gathered += gathers * priced.element_bytes * of_held
    return {"gradient_reduce": reduced, "parameter_all_gather": gathered}
