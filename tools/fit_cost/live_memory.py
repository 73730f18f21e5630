"""What of a layout's memory is alive: what decides whether it fits, and what some sources print."""

from __future__ import annotations

from shardwright.cost.peak_memory import RankBytes, framework_bytes
from shardwright.cost.priced_layout import Layout


def live_bytes(layout: Layout) -> int:
    """The fullest rank's, without what the allocator keeps beside it."""
    ranks = RankBytes(layout)
    return max(ranks.peak_bytes(blocks, 0) for blocks in layout.ranks)


def allocated_bytes(layout: Layout) -> float:
    """torch.cuda.max_memory_allocated() of the first pipeline rank: no context, nothing that the
    allocator keeps."""
    return RankBytes(layout).peak_bytes(layout.ranks[0], 0) - framework_bytes(layout)
