"""How far `model.loss: chunked` cuts a micro-batch: what the runtime runs is what the cost model
counts."""

from __future__ import annotations

MAX_CHUNK_TOKENS = 1024
"""Enough rows for a matrix product over the vocabulary to run at its rate."""
MIN_CHUNKS = 8


def chunk_length(micro_batch_size: int, sequence_length: int) -> int:
    """Positions of every row whose logits exist at a time: at most MAX_CHUNK_TOKENS tokens, and at
    most an eighth."""
    return max(1, min(MAX_CHUNK_TOKENS // micro_batch_size, -(-sequence_length // MIN_CHUNKS)))
