"""Stage 3's output: the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.recipe.literal_types import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str  # catalogue name, or "inline"
    memory_gib: float
    hbm_bytes_per_second: float
    peak_flops: Mapping[str, float]  # precision -> dense FLOP/s
    watts: float | None  # the board's power limit; None: peak_flops are what it sustains
    cache_bytes: float  # of the last level, before the memory
    compute_units: int  # streaming multiprocessors (NVIDIA), compute units (AMD)
    is_cpu: bool = False
    fused_attention_gain: float = (
        1.0  # rate of fused attention's products over FlashAttention-2's on an A100
    )
    softmax_gain: float = 1.0  # the same of its exponentials
    best_product_flops: float | None = (
        None  # the fastest dense product that was measured, half precision
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Bandwidths are per GPU, one direction."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    host_memory_bytes: float | None
    shared_filesystem: bool
    price_per_gpu_hour: float | None
    fabric: Fabric = "infiniband"
    fabric_is_given: bool = False  # by the recipe

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def capacity_bytes(self) -> int:
        return int(self.gpu.memory_gib * 2**30)

    def verify(self) -> None:
        if self.world_size < 1 or self.capacity_bytes <= 0:
            raise ValueError("a cluster needs at least one GPU with memory")
