"""What offloaded states take of a node's memory: asked by the compiler of the recipe, by `doctor`
of the hosts."""

from __future__ import annotations

from shardwright.recipe.literal_types import Offload

# In host memory, per parameter of the model: master weights, two moments and the gradient in
# float32 (arXiv
# 2101.06840), and the parameters themselves in half precision.
OFFLOADED_BYTES = {"none": 0, "optimizer": 16, "parameters": 18}
HOST_SHARE = 0.9
"""The rest is the system's, the data loaders' and the file cache's."""


def offloaded_bytes(offload: Offload, parameters: int, nodes: int) -> float:
    """In each node's memory."""
    return OFFLOADED_BYTES[offload] * parameters / nodes


def has_room(memory_bytes: float, needed_bytes: float) -> bool:
    """Whether a node with this much memory can hold them; one that runs out kills its ranks without
    a message."""
    return needed_bytes <= HOST_SHARE * memory_bytes
