"""How many ranks a search lets share a row."""

from __future__ import annotations

from shardwright.layout.divisors import divisors

LEAST_PIECE = 8192
"""Tokens of a row that a rank keeps: as many as Llama 3's did, 131,072 over 16 ranks (arXiv
2407.21783, table 4). Rows of one such piece are short enough for data ranks: a search cuts none
further, a pin may."""


def context_degrees(sequence_length: int, gpus_per_node: int) -> tuple[int, ...]:
    """A group stands inside a node, whose links its all-to-alls want."""
    found = (
        s
        for s in divisors(gpus_per_node)
        if sequence_length % s == 0 and sequence_length // s >= LEAST_PIECE
    )
    return tuple(found) or (1,)
