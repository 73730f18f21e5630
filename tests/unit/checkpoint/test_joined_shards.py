"""Joining shards is the inverse of cutting them."""

from __future__ import annotations

import pytest
import torch

from shardwright.checkpoint.checkpoint_loader import join
from shardwright.layout.parameter_sharding import ParameterSharding


def cut(
    whole: torch.Tensor, dimension: int, blocks: tuple[int, ...], sizes: tuple[int, ...]
) -> list[torch.Tensor]:
    if len(blocks) == 1:
        return list(whole.split(sizes, dim=dimension))
    degree = len(sizes)
    parts = [block.chunk(degree, dim=dimension) for block in whole.split(blocks, dim=dimension)]
    return [torch.cat([p[r] for p in parts], dim=dimension) for r in range(degree)]


@pytest.mark.parametrize(
    ("shape", "dimension", "blocks", "sizes"),
    [
        ((8, 6), 0, (8,), (4, 4)),
        ((8, 6), 1, (6,), (3, 3)),
        ((257, 6), 0, (257,), (129, 128)),
        ((6, 24), 1, (8, 8, 8), (12, 12)),
        ((24,), 0, (8, 8, 8), (6, 6, 6, 6)),
        ((8,), None, (), ()),
    ],
)
def test_join_undoes_the_cut(
    shape: tuple[int, ...], dimension: int | None, blocks: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    whole = torch.randn(shape)
    split = ParameterSharding(
        name="w", shape=shape, dimension=dimension, blocks=blocks, sizes=sizes
    )
    parts = [whole] if dimension is None else cut(whole, dimension, blocks, sizes)
    assert torch.equal(join(split, parts), whole)


def test_copies_of_a_shard_are_read_once() -> None:
    """Two key/value heads of three features over four ranks."""
    whole = torch.randn(6, 5)
    split = ParameterSharding(
        name="w", shape=(6, 5), dimension=0, blocks=(6,), sizes=(3, 3, 3, 3), copies=2
    )
    assert [split.shard_ranges(rank) for rank in range(4)] == [
        ((0, 3),),
        ((0, 3),),
        ((3, 3),),
        ((3, 3),),
    ]
    assert torch.equal(join(split, [whole[:3], whole[3:]]), whole)
