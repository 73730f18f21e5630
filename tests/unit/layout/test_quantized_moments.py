"""Which parameters have 8-bit moments, and which ranks cut their blocks."""

from __future__ import annotations

import pytest

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.layout.quantized_moments import (
    BLOCK,
    is_quantized,
    keeps_blocks,
    scale_sharding,
)


def split(
    shape: tuple[int, ...], dimension: int | None, *sizes: int, copies: int = 1
) -> ParameterSharding:
    full = () if dimension is None else (shape[dimension],)
    return ParameterSharding(
        name="w", shape=shape, dimension=dimension, blocks=full, sizes=sizes, copies=copies
    )


def test_small_and_odd_parameters_stay_in_fp32() -> None:
    assert is_quantized(4096) and is_quantized(257 * 512)
    assert not is_quantized(4096 - BLOCK) and not is_quantized(257 * 64)


@pytest.mark.parametrize(
    ("sharding", "experts", "kept"),
    [
        (split((64, 96), None), 1, True),
        (split((512, 512), 0, 256, 256), 1, True),
        (split((257, 512), 0, 129, 128), 1, True),
        (split((512, 512), 1, 256, 256), 1, True),
        (split((512, 768), 1, 384, 384), 1, False),
        (split((512, 384), 0, 256, 256), 1, False),
        (split((4, 64, 64), None), 2, True),
        (split((4, 24, 64), None), 2, True),
        (split((8, 8, 64), None), 8, True),
        (split((8, 8, 24), None), 8, False),
        (split((8, 256, 512), 2, 256, 256), 4, True),
        (split((512, 256), 0, 256, 256, 256, 256, copies=2), 1, True),
    ],
)
def test_ranks_keep_blocks(sharding: ParameterSharding, experts: int, kept: bool) -> None:
    assert keeps_blocks(sharding, experts) is kept


def test_scales_are_sharded_as_their_blocks() -> None:
    rows = scale_sharding(split((512, 1024), 0, 256, 256), "w@scale")
    assert (rows.name, rows.shape, rows.dimension, rows.sizes) == (
        "w@scale",
        (512, 4),
        0,
        (256, 256),
    )
    columns = scale_sharding(split((512, 1024), 1, 512, 512), "w@scale")
    assert (columns.shape, columns.sizes, columns.blocks) == ((512, 4), (2, 2), (4,))
    for found in (rows, columns):
        found.verify()
    unsharded = scale_sharding(split((512, 1024), None), "w@scale")
    assert unsharded.shape == (512, 4)
    assert scale_sharding(split((64, 96), None), "w@scale").shape == (24,)
