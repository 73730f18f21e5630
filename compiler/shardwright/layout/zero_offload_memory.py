"""What offloaded states take of a node's memory: asked by the compiler of the recipe, by `doctor`
of the hosts."""

from __future__ import annotations

from shardwright.recipe.literal_types import Offload

# In host memory, per parameter of the model: master weights, two moments and the gradient in
# float32 (arXiv
# 2101.06840), and the parameters themselves in half precision.
OFFLOADED_BYTES_PER_PARAMETER = {"none": 0, "optimizer": 16, "parameters": 18}
USABLE_HOST_MEMORY_FRACTION = 0.9
"""The rest is the system's, the data loaders' and the file cache's."""


def offloaded_bytes(offload: Offload, parameters: int, nodes: int) -> float:
    """In each node's memory."""
    return OFFLOADED_BYTES_PER_PARAMETER[offload] * parameters / nodes


def fits_in_host_memory(memory_bytes: float, needed_bytes: float) -> bool:
    """Whether a node with this much memory can hold them; one that runs out kills its ranks without
    a message."""
    return needed_bytes <= USABLE_HOST_MEMORY_FRACTION * memory_bytes
