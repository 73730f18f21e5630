"""What of a layout's memory decides whether it fits."""

from __future__ import annotations

from shardwright.cost.layout import Layout
from shardwright.cost.memory import RankBytes


def live_bytes(layout: Layout) -> int:
    """The fullest rank's, without what the allocator keeps beside it."""
    ranks = RankBytes(layout)
    return max(ranks.peak_bytes(blocks, 0) for blocks in layout.ranks)
