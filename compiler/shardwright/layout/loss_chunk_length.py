"""How far `model.loss: chunked` cuts a micro-batch: what the runtime runs is what the cost model
counts."""

from __future__ import annotations

LARGEST_TOKENS = 1024
"""Enough rows for a matrix product over the vocabulary to run at its rate."""
FEWEST_CHUNKS = 8


def chunk_length(micro_batch_size: int, sequence_length: int) -> int:
    """Positions of every row whose logits exist at a time: at most LARGEST_TOKENS tokens, and at
    most an eighth."""
    return max(1, min(LARGEST_TOKENS // micro_batch_size, -(-sequence_length // FEWEST_CHUNKS)))
