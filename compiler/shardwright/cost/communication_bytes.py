"""What the collectives of a step move: their buffers' bytes and how often they run. Their seconds
are in passes.py and data_parallel.py, by the counts of this file; tests/parity/bytes compares the
counts with those of real runs.

A buffer is counted whole, what stays on its rank included: a ring over n ranks moves (n - 1) / n of
it. Left out is what has a number a token or less: the cross-entropy's maximum and sum over a cut
vocabulary, losses, norms and an expert's counts of rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.cost.collective_seconds import all_to_all_seconds, gather_seconds
from shardwright.cost.layer_shapes import LayerShape, recompute_stops_early
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.layout.formats import element_bytes
from shardwright.layout.zero_settings import LIVE_NUMEL
from shardwright.utils.memoize import memoize

# Weights that ZeRO-3 leaves whole on each rank, and so does not gather again.
#
# DeepSpeed releases a module's weights unless they come up again before LIVE_NUMEL elements of
# others
# do (zero/partitioned_param_coordinator.py, __params_to_release; stage3_max_reuse_distance): the
# last
# layers stay from their forward to their backward pass, and so does of a layer that is recomputed
# what is behind.


class UnshardedWeights(NamedTuple):
    """Elements of a rank: those that are gathered again between a micro-batch's forward and
    backward pass, and those that are whole when the forward pass ends."""

    again: float
    kept: float


def backward_gather_fraction(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Of a pipeline rank's parameters the share that is gathered for the backward pass, beside all
    of them for the forward pass. PyTorch's FSDP gathers all of them twice."""
    if layout.traits.zero3_gathers_flat_layers:
        return 1.0
    held = layout.numel_of_chunks(blocks) - layout.expert_numel_of(blocks) * (
        1 - 1 / layout.strategy.expert
    )
    return unsharded_weights(layout, blocks).again / held if held else 0.0


def _depends_on(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> Hashable:
    spans = [(b.start, b.stop, _recomputed_until(layout, b)) for b in blocks]
    return layout.graph.identity, layout.strategy.tensor, layout.strategy.expert, LIVE_NUMEL, *spans


@memoize(_depends_on)
def unsharded_weights(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> UnshardedWeights:
    again = kept = between = (
        0.0  # between: elements that come up after a layer's forward pass and before its next use
    )
    for block in reversed(blocks):
        until = _recomputed_until(layout, block)
        for at in reversed(range(block.start, block.stop)):
            modules = _modules(layout, blocks, at)
            own, behind, recomputed = (
                sum(modules),
                0.0,
                layout.shapes.kind_of[at] >= 0 and at < until,
            )
            for numel in reversed(modules):
                # All of the layer comes up from a module's forward pass to where it is recomputed,
                # but for itself.
                released = between + (own - numel if recomputed else 2 * behind) >= LIVE_NUMEL
                kept += numel * (not released)
                # The last module stays: recomputation ends inside it.
                again += numel * (
                    released + (recomputed and behind > 0 and 2 * behind >= LIVE_NUMEL)
                )
                behind += numel
            between += (3 if recomputed else 2) * own
    return UnshardedWeights(again, kept)


def _recomputed_until(layout: PricedLayout, block: ModelChunk) -> int:
    if layout.checkpointed_activations is not None:
        return layout.checkpointed_stop(block.start, block.stop)
    return block.stop if layout.strategy.checkpointing == "full" else block.start


def _modules(layout: PricedLayout, blocks: tuple[ModelChunk, ...], at: int) -> list[float]:
    """Elements of a layer's matrices on a device, in their order; experts' are one module. The rest
    of its parameters counts with the first."""
    shapes, expert = layout.shapes, layout.strategy.expert
    numel = float(shapes.numel[at + 1] - shapes.numel[at])
    if shapes.kind_of[at] < 0:
        tied = at == 0 and layout.has_head(blocks)  # it came with the head
        return [numel - shapes.shared_numel * tied]
    kind = shapes.kinds[shapes.kind_of[at]]
    sizes = [float(p.n * p.k) for p in kind.products if p.batch == 1]
    if kind.expert_numel:
        sizes.append(kind.expert_numel / expert)
    rest = numel - kind.expert_numel * (1 - 1 / expert) - sum(sizes)
    return [sizes[0] + rest, *sizes[1:]] if sizes else [rest]


# What expert ranks cost beside their experts' own products: rows that travel, and rows that arrive
# unevenly.
#
# A routed token's hidden states go to the rank of each chosen expert and come back: 2 b S k H
# elements a layer forward, of which (e - 1) / e leave the rank, and as many backward; every tensor
# rank sends all of it. Shape letters: b micro-batch, S tokens of a row on a rank, H hidden size, k
# chosen experts, e expert ranks, t tensor ranks.


EXPERT_IMBALANCE = 1.25
"""Rows of the fullest rank over the mean. Nothing is dropped, so that there is no bound: routers
trained with a balance loss stay near the mean, and an estimate is of those. Twice the mean is
possible early in training."""


def expert_exchange_seconds(layout: PricedLayout) -> list[float]:
    """Of each layer forward: the counts, the rows' way there and their way back. As long
    backward."""
    s, cluster = layout.strategy, layout.cluster
    if s.expert == 1:
        return [0.0] * len(layout.graph.layers)
    # With the sequence shared out each tensor rank sends the rows of its own tokens; those that cut
    # an expert together gather them first, and reduce what comes out
    # (megatron/core/transformer/moe/token_dispatcher.py).
    share = s.tensor if s.sequence_parallel else 1
    group = layout.group(s.expert, s.expert_tensor_ranks)
    gathers = share > 1 and s.expert_tensor_ranks > 1

    def of_layer(kind: LayerShape) -> float:
        rows = EXPERT_IMBALANCE * 2 * routed_token_bytes(layout, kind)
        travel = all_to_all_seconds(cluster, layout.constants, group, rows / share, 3)
        together = layout.group(s.expert_tensor_ranks, 1)
        return travel + (
            gather_seconds(cluster, layout.constants, together, rows, 2) if gathers else 0.0
        )

    seconds = [of_layer(kind) if kind.experts_per_token else 0.0 for kind in layout.shapes.kinds]
    return [0.0 if kind < 0 else seconds[kind] for kind in layout.shapes.kind_of]


def routed_token_bytes(layout: PricedLayout, kind: LayerShape) -> float:
    """The rows of one micro-batch, a copy for each chosen expert."""
    return layout.tokens * kind.experts_per_token * layout.graph.hidden_size * layout.element_bytes


def imbalance_bytes(layout: PricedLayout, kind: LayerShape) -> float:
    """What a layer keeps on a rank beyond what it keeps without expert ranks: inputs and inner
    features of the rows beyond the mean. The rows that arrived are the experts' inputs themselves,
    and those that came back their weighed outputs: the layer's own activations have both already,
    and an all-to-all saves nothing for its backward pass."""
    s = layout.strategy
    if s.expert == 1 or not kind.experts_per_token:
        return 0.0
    inner = layout.tokens * kind.experts_per_token * kind.expert_features * layout.element_bytes
    return (EXPERT_IMBALANCE - 1) * (routed_token_bytes(layout, kind) + inner)


def dispatch_buffer_bytes(layout: PricedLayout, kind: LayerShape) -> float:
    """An all-to-all's own input, which stands beside what arrives while the rows travel."""
    return (
        routed_token_bytes(layout, kind)
        if layout.strategy.expert > 1 and kind.experts_per_token
        else 0.0
    )


class LayerAllReduces(NamedTuple):
    """All-reduces of tensor parallelism in a decoder layer: in its forward pass, as many of its
    gradients in the backward pass, and those that recomputation runs again."""

    forward: int
    again: int


def layer_all_reduces(layout: PricedLayout) -> LayerAllReduces:
    """One for each half whose features are cut (arXiv 1909.08053). The attention module has one of
    them; Megatron's "selective" repeats none."""
    s, shapes = layout.strategy, layout.shapes
    if s.tensor == 1:
        return LayerAllReduces(0, 0)
    attention, feed_forward = shapes.attention_degree > 1, shapes.feed_forward_degree > 1
    again_attention, again_feed_forward = {"none": (0, 0), "selective": (1, 0), "full": (1, 1)}[
        s.checkpointing
    ]
    if s.checkpointing == "selective" and not layout.traits.selective_recomputes_projections:
        again_attention = 0
    elif recompute_stops_early(
        layout.graph, layout.recipe.assume.kernels
    ):  # the last product's reduction is left out with it
        again_attention, again_feed_forward = {"none": (0, 0), "selective": (0, 0), "full": (1, 0)}[
            s.checkpointing
        ]
    again = again_attention * attention + again_feed_forward * feed_forward
    return LayerAllReduces(attention + feed_forward, again)


def hidden_state_bytes(layout: PricedLayout) -> int:
    """The hidden states of a micro-batch on one rank."""
    return layout.tokens * layout.graph.hidden_size * layout.element_bytes


def context_exchange_bytes(layout: PricedLayout) -> float:
    """Of a layer's four trades around attention forward: queries and output, keys and values. Keys'
    heads that the context ranks do not divide are repeated. Or the keys and values of the whole
    row, gathered."""
    graph, degree, s = layout.graph, layout.shapes.attention_degree, layout.strategy
    if layout.traits.context_gathers_kv:
        kept = 2 * max(1, graph.key_value_heads // degree) * graph.head_dim * layout.element_bytes
        return s.context * layout.tokens * kept
    key_value_heads = math.lcm(max(1, graph.key_value_heads // degree), s.context)
    heads = 2 * graph.attention_heads / degree + 2 * key_value_heads
    return layout.tokens * heads * graph.head_dim * layout.element_bytes


def pipeline_sends(layout: PricedLayout, rank: int) -> int:
    """That a pipeline rank sends for a micro-batch, activations and gradients; as many arrive.
    DualPipeV goes through the ranks twice, there and back; under interleaving every part has both
    neighbours."""
    s = layout.strategy
    if s.pipeline == 1:
        return 0
    if s.is_interleaved:
        return 2 * s.virtual_stages
    neighbours = (rank > 0) + (rank < s.pipeline - 1)
    return neighbours * s.pipeline_schedule.stages_per_rank


class GradientReduction(NamedTuple):
    """How often a step reduces a rank's gradients over the ranks that hold the same parameters, and
    the bytes of an element."""

    times: int
    element_bytes: int


def gradient_reduction(layout: PricedLayout) -> GradientReduction:
    """ZeRO-2 and 3 keep no gradient of other ranks' parameters, so that each micro-batch's are
    reduced (arXiv
    1910.02054)."""
    s = layout.strategy
    if s.zero_stage >= 2:
        return GradientReduction(s.gradient_accumulation_steps, layout.element_bytes)
    return GradientReduction(1, element_bytes(layout.accumulation_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes of a step on one device of a pipeline rank.

    rows: of tokens on their way to the ranks of their experts and back, on the mean rank of an
    expert group. trades: around attention, tokens for heads. activations: what tensor ranks reduce.
    joined: what they gather: outputs that each needs whole, and messages between pipeline ranks, of
    which each sent a share. sent: those shares. tied: the gradient of a tensor on the first and the
    last pipeline rank. reduced, gathered: gradients and parameters over data ranks.
    """

    rows: float
    context_all_to_all: float
    activations: float
    tensor_all_gather: float
    sent: float
    tied: float
    reduced: float
    gathered: float


def step_traffic(layout: PricedLayout, rank: int) -> StepTraffic:
    """layout: placed. hpZ's gathers are counted as any others of ZeRO-3, though most of them stay
    inside a node."""
    s, blocks, shapes = layout.strategy, layout.ranks[rank], layout.shapes
    m, partial = s.gradient_accumulation_steps, layout.checkpointed_activations is not None

    def of(spans: list[tuple[int, int]]) -> list[LayerShape]:
        kinds = [kind for start, stop in spans for kind in shapes.kind_of[start:stop]]
        return [shapes.kinds[kind] for kind in kinds if kind >= 0]

    layers = of([(b.start, b.stop) for b in blocks])
    again = layers if s.checkpointing != "none" else []
    if partial:
        again = of([(b.start, layout.checkpointed_stop(b.start, b.stop)) for b in blocks])
    reductions, hidden, ends = (
        layer_all_reduces(layout),
        hidden_state_bytes(layout),
        _ends(layout, rank),
    )
    inputs = sum((kind.gathered_features - kind.gathered_outputs) // 2 for kind in layers)
    outputs = sum(kind.gathered_outputs for kind in layers)
    count, sends = (
        len(layers) * 2 * reductions.forward + len(again) * reductions.again + ends,
        pipeline_sends(layout, rank),
    )
    shares = s.message_shards
    travelling = [*layers, *layers, *(again if s.checkpointing == "full" else [])]
    sharers = s.tensor if s.sequence_parallel else 1
    return StepTraffic(
        rows=m * sum(2 * routed_token_bytes(layout, kind) for kind in travelling) / sharers
        if s.expert > 1
        else 0.0,
        context_all_to_all=m * (2 * len(layers) + len(again)) * context_exchange_bytes(layout)
        if s.context > 1
        else 0.0,
        activations=m * (count * hidden + inputs * layout.tokens * layout.element_bytes)
        if s.tensor > 1
        else 0.0,
        tensor_all_gather=m
        * (
            _pipeline_gathers(layout, rank) * hidden
            + outputs * layout.tokens * layout.element_bytes
        ),
        sent=m * sends * hidden / shares,
        tied=_tied_bytes(layout, rank),
        **_data_parallel_bytes(layout, rank),
    )


def _ends(layout: PricedLayout, rank: int) -> int:
    """All-reduces of a whole micro-batch's hidden states beside the layers': the rows that were
    looked up, and the gradient behind the head."""
    blocks = layout.ranks[rank]
    return (blocks[0].start == 0) + layout.has_head(blocks)


def _pipeline_gathers(layout: PricedLayout, rank: int) -> int:
    """Messages that tensor ranks sent shares of, made whole again: an activation and a gradient
    that arrive, and DeepSpeed's own output, of which it keeps a share until its backward pass
    (pipe/engine.py, _exec_backward_pass)."""
    s = layout.strategy
    if s.message_shards == 1 or s.pipeline == 1 or s.sequence_parallel:
        return 0
    return (rank > 0) + 2 * (rank < s.pipeline - 1)


def _tied_bytes(layout: PricedLayout, rank: int) -> float:
    s = layout.strategy
    if s.ends_share_rank or rank not in (0, s.pipeline - 1):
        return 0.0
    return float(layout.shapes.shared_numel * element_bytes(layout.accumulation_dtype))


def _data_parallel_bytes(layout: PricedLayout, rank: int) -> dict[str, float]:
    s = layout.strategy
    blocks = layout.ranks[rank]
    experts, trained = layout.expert_numel_of(blocks), layout.trainable_numel_of(blocks)
    reduced = gathered = 0.0
    times, gradient = gradient_reduction(layout)
    gathers, held = float(s.zero_stage > 0), trained
    if s.zero_stage == 3 and s.zero_world_size > 1:
        gathers, held = (
            s.gradient_accumulation_steps * (1 + backward_gather_fraction(layout, blocks)),
            layout.numel(rank),
        )
    own = experts / s.expert_shard_ratio
    for of_trained, of_held, ranks in (
        (trained - experts, held - experts, s.zero_world_size),
        (own, own, s.expert_replicas),  # over the ranks that hold the same experts
    ):
        if ranks > 1:
            reduced += times * gradient * of_trained
            gathered += gathers * layout.element_bytes * of_held
    return {"reduced": reduced, "gathered": gathered}
