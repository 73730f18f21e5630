"""Say which parameters have 8-bit moments, and how the scales of their blocks are sharded.

A block is 256 elements in a row of the flattened weight (out, in), as torchao's AdamW8bit has it in
one process. A tensor or expert rank that holds unbroken blocks quantizes as one process does.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.layout.parameter_sharding import ParameterSharding

BLOCK = 256
CHUNK_BLOCKS = 2**16
"""Bounds the blocks that are updated at a time, and so the temporary memory."""
_LEAST_ELEMENTS = 4096


def is_quantized(numel: int) -> bool:
    """Return whether a parameter of this size has 8-bit moments: torchao's rule."""
    return numel >= _LEAST_ELEMENTS and numel % BLOCK == 0


def scale_sharding(split: ParameterSharding, name: str) -> ParameterSharding:
    """Return how the scales of a quantized parameter are sharded, as a parameter `name`.

    split: in the orientation (out, in)
    """
    *stack, columns = split.shape
    if columns % BLOCK:
        numel = 1
        for size in split.shape:
            numel *= size
        return ParameterSharding(
            name=name, shape=(numel // BLOCK,), dimension=None, blocks=(), sizes=()
        )
    found = replace(split, name=name, shape=(*stack, columns // BLOCK))
    if split.dimension != len(stack):
        return found
    return replace(
        found,
        blocks=tuple(n // BLOCK for n in split.blocks),
        sizes=tuple(n // BLOCK for n in split.sizes),
    )


def keeps_blocks(split: ParameterSharding, experts: int) -> bool:
    """Return whether no block of a quantized parameter is shared by tensor or expert ranks.

    split: in the orientation (out, in)
    experts: equal parts of the first dimension, one for each expert rank
    """
    numel = split.shard_numel(0) if split.dimension is None else 0
    if split.dimension is None:
        return experts == 1 or numel // experts % BLOCK == 0
    if split.shape[-1] % BLOCK:
        return False
    if split.dimension < len(split.shape) - 1:
        return True
    ranks = range(0, len(split.sizes), split.copies)
    return all(n % BLOCK == 0 for rank in ranks for _, n in split.shard_ranges(rank))
