"""What ZeRO communicates at once, in elements: DeepSpeed's own defaults, which the plan writes out
and the cost model counts with.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.recipe.literal_types import Offload
from shardwright.utils.json_values import JsonObject

BUCKET_NUMEL = 500_000_000
PREFETCH_NUMEL = 50_000_000
"""ZeRO-3 gathers parameters ahead up to so many; one that is larger comes whole, by itself."""
LIVE_NUMEL = 1_000_000_000

# The key of hpZ, a second copy of ZeRO-3's weights inside each node: the layout decides it, a
# recipe can say no.


HPZ = "zero_hpz_partition_size"
"""In DeepSpeed's zero_optimization section: ranks that share one copy; 1 for none."""


def disables_hpz(extra: JsonObject) -> bool:
    """Of a recipe's `extra`."""
    section = extra.get("zero_optimization")
    return isinstance(section, Mapping) and section.get(HPZ) == 1


# What offloaded states take of a node's memory: asked by the compiler of the recipe, by `doctor`
# of the hosts.


USABLE_HOST_MEMORY_FRACTION = 0.9
"""The rest is the system's, the data loaders' and the file cache's."""


def offloaded_bytes(optimizer: str, offload: Offload, parameters: int, nodes: int) -> float:
    """Return the bytes that offloaded states take of each node's memory."""
    return OPTIMIZERS[optimizer].offloaded_bytes(offload) * parameters / nodes


def fits_in_host_memory(memory_bytes: float, needed_bytes: float) -> bool:
    """Whether a node with this much memory can hold them; one that runs out kills its ranks without
    a message."""
    return needed_bytes <= USABLE_HOST_MEMORY_FRACTION * memory_bytes
