"""Define ZeRO's communication sizes in elements and what offload takes of host memory.

The sizes are DeepSpeed's defaults; the plan writes them out and the cost model counts with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.recipe.literal_types import Offload
from shardwright.utils.json_values import JsonObject

BUCKET_NUMEL = 500_000_000
PREFETCH_NUMEL = 50_000_000
"""ZeRO-3 gathers up to this many parameters ahead; a larger parameter is gathered by itself."""
LIVE_NUMEL = 1_000_000_000
MUON_BUCKET_NUMEL = 2**26
"""Muon gathers up to this many elements of shared matrices at a time, or one larger matrix."""

# hpZ keeps a second copy of ZeRO-3's weights inside each node. The layout decides; a recipe can
# disable it.
HPZ = "zero_hpz_partition_size"
"""Names the key of DeepSpeed's zero_optimization section: ranks that share one copy, or 1."""


def disables_hpz(extra: JsonObject) -> bool:
    """Return whether the recipe's `extra` turns hpZ off."""
    section = extra.get("zero_optimization")
    return isinstance(section, Mapping) and section.get(HPZ) == 1


# What offloaded states take of a node's memory: asked by the compiler of the recipe, by `doctor`
# of the hosts.


USABLE_HOST_MEMORY_FRACTION = 0.9
"""Leaves the rest to the system, the data loaders and the file cache."""


def offloaded_bytes(optimizer: str, offload: Offload, parameters: int, nodes: int) -> float:
    """Return the bytes that offloaded states take of each node's memory."""
    return OPTIMIZERS[optimizer].offloaded_bytes(offload) * parameters / nodes


def fits_in_host_memory(memory_bytes: float, needed_bytes: float) -> bool:
    """Return whether a node's memory holds the offloaded states.

    A node that runs out of memory kills its ranks without a message.
    """
    return needed_bytes <= USABLE_HOST_MEMORY_FRACTION * memory_bytes
