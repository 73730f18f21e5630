"""What expert ranks cost beside their experts' own products: rows that travel, and rows that arrive
unevenly.

A routed token's hidden states go to the rank of each chosen expert and come back: 2 b S k H
elements a layer forward, of which (e - 1) / e leave the rank, and as many backward; every tensor
rank sends all of it. Shape letters: b micro-batch, S tokens of a row on a rank, H hidden size, k
chosen experts, e expert ranks, t tensor ranks.
"""

from __future__ import annotations

from shardwright.cost.collective_seconds import all_to_all_seconds, gather_seconds
from shardwright.cost.layer_shapes import LayerShape
from shardwright.cost.priced_layout import PricedLayout

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
