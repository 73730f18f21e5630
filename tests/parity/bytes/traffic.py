"""Bytes that a rank hands to its collectives in a step, by what they are for: the counts behind their seconds, which
tests/parity/test_bytes.py compares with those of real runs."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.experts import rows_bytes
from shardwright.cost.layout import Layout
from shardwright.cost.passes import traded_bytes
from shardwright.ir.recipe import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of one pipeline rank, what stays on the rank itself counted too: of a collective's buffer a rank of n keeps one
    nth.

    rows: of tokens on their way to experts and back. trades: around attention, heads for tokens. activations: all that
    tensor ranks reduce inside the layers. sent: to the neighbouring stages. reduced, gathered: ZeRO's, of the
    parameters that all of its ranks have; of_experts: both of them, of experts.
    """

    rows: float
    trades: float
    activations: float
    sent: float
    reduced: float
    gathered: float
    of_experts: tuple[float, float]


def step_traffic(layout: Layout, rank: int) -> Traffic:
    """layout: placed; without LoRA, offload, partial checkpointing and hpZ."""
    s, blocks, shapes = layout.strategy, layout.ranks[rank], layout.shapes
    m = s.gradient_accumulation_steps
    kinds = [shapes.kinds[k] for b in blocks for k in shapes.kind_of[b.start : b.stop] if k >= 0]
    rows = sum(2 * rows_bytes(layout, kind) for kind in kinds if kind.chosen_experts) if s.expert > 1 else 0.0
    trades = len(kinds) * traded_bytes(layout) if s.context > 1 else 0.0
    message = layout.tokens * layout.graph.hidden_size * layout.element_bytes
    cut = (shapes.attention_degree > 1) + (shapes.feed_forward_degree > 1)
    full, repeated = s.checkpointing == "full", s.checkpointing != "none"
    neighbours = (rank > 0) + (rank < s.pipeline - 1)
    experts = layout.experts_of(blocks)
    return Traffic(
        rows=m * (2 + full) * rows,
        trades=m * (2 + repeated) * trades,
        activations=m * 2 * len(kinds) * cut * message if s.tensor > 1 else 0.0,
        sent=m * neighbours * message / s.tensor,
        **dict(zip(("reduced", "gathered"), _zero(layout, layout.numel(rank) - experts, s.shards), strict=True)),
        of_experts=_zero(layout, experts / s.expert, s.shards // s.expert),
    )


def _zero(layout: Layout, numel: float, ranks: int) -> tuple[float, float]:
    """Gradients reduced, and parameters gathered, over so many ranks."""
    s, m = layout.strategy, layout.strategy.gradient_accumulation_steps
    if ranks == 1:
        return 0.0, 0.0
    gradient = ELEMENT_BYTES[layout.accumulation_dtype] if s.zero_stage <= 1 else layout.element_bytes
    reductions, gathers = (m if s.zero_stage >= 2 else 1), (2 * m if s.zero_stage == 3 else s.zero_stage > 0)
    return reductions * numel * gradient, gathers * numel * layout.element_bytes
