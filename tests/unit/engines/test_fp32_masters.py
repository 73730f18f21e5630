"""The masters of a new start are the stored weights, where the engine's are their rounding."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.engines.fp32_masters import fill_fp32_masters
from shardwright.engines.trainer_protocol import OwnedShard


class Stored:
    """As modules.shards.Shards: one parameter, in fp32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(5, 7)

    def loses_bits(self, name: str, dtype: torch.dtype) -> bool:
        return name == "w" and dtype != torch.float32

    def read(self, name: str) -> torch.Tensor:
        return self.weight


def fragment(stored: Stored, start: int, numel: int, name: str = "w", moved: int = 0) -> OwnedShard:
    """moved: by how much the master lies elsewhere than the engine tells."""
    flat = stored.weight.reshape(-1)
    live = flat[start : start + numel].bfloat16()
    master = flat.roll(moved)[start : start + numel].bfloat16().float()
    return OwnedShard(
        name=name,
        shard_shape=(5, 7),
        start=start,
        states={"fp32": master},
        live=live,
        partitioned=True,
    )


def test_each_range_gets_its_own_bits() -> None:
    stored: Any = Stored()
    fragments = [fragment(stored, 0, 18), fragment(stored, 18, 17)]
    fill_fp32_masters(fragments, stored)
    assert torch.equal(torch.cat([f.states["fp32"] for f in fragments]), stored.weight.reshape(-1))
    for f in fragments:
        assert torch.equal(f.states["fp32"].bfloat16(), f.live)


def test_what_is_no_rounding_of_the_stored_weights_stays() -> None:
    """Masters elsewhere than the engine tells, and an adapter's, which no file holds."""
    stored: Any = Stored()
    for f in (fragment(stored, 3, 9, moved=1), fragment(stored, 3, 9, name="adapter")):
        before = f.states["fp32"].clone()
        fill_fp32_masters([f], stored)
        assert torch.equal(f.states["fp32"], before)
