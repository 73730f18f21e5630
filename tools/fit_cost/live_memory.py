"""What of a layout's memory is alive: what decides whether it fits, and what some sources print."""

from __future__ import annotations

from shardwright.cost.peak_memory import RankMemoryModel, framework_bytes
from shardwright.cost.priced_layout import PricedLayout


def live_bytes(layout: PricedLayout) -> int:
    """The fullest rank's, without what the allocator keeps beside it."""
    ranks = RankMemoryModel(layout)
    return max(ranks.peak_bytes(blocks, 0) for blocks in layout.ranks)


def allocated_bytes(layout: PricedLayout) -> float:
    """torch.cuda.max_memory_allocated() of the first pipeline rank: no context, nothing that the
    allocator keeps."""
    return RankMemoryModel(layout).peak_bytes(layout.ranks[0], 0) - framework_bytes(layout)
