"""The cost model's numbers that no data sheet gives, read once from constants.json.

Each stands there with its unit, its meaning, its source or prior, and whether `make fit-cost` fits
it. They are shared by all GPUs and models. Nothing else in cost/ holds a bare constant.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import TypedDict

from shardwright.engines.kernel_traffic import KERNEL_TRAFFIC


class ConstantEntry(TypedDict):
    """prior_spread: of the logarithm, how far the fit may move it; 0 = not fitted."""

    value: float
    unit: str
    prior: float
    prior_spread: float
    meaning: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The values alone; constants.json says what each means. An argument of the model, so that a
    fit can vary it."""

    # matrix products
    gemm_efficiency: float
    tile_seconds: float
    watts_per_tflops: float
    width_alignment_efficiency: float
    load_alignment_efficiency: float
    # attention
    fused_attention_efficiency: float
    softmax_unit_seconds: float
    score_passes_hf: float
    score_passes_megatron: float
    score_passes_compiled: float
    # kernels that move memory
    memory_efficiency: float
    logit_traffic_bytes_hf: float
    logit_traffic_bytes_megatron: float
    logit_traffic_bytes_compiled: float
    optimizer_traffic_bytes: float
    # what the host and the schedule add
    launch_seconds: float
    kernels_per_layer_hf: float
    kernels_per_layer_megatron: float
    kernels_per_layer_compiled: float
    micro_batch_seconds: float
    # links
    intra_node_efficiency: float
    inter_node_efficiency: float
    intra_node_hop_seconds: float
    inter_node_hop_seconds: float
    collective_host_seconds: float
    zero_reduction_efficiency: float
    pipeline_host_seconds: float
    hook_seconds: float
    overlap_megatron: float
    overlap_deepspeed: float
    overlap_fsdp: float
    overlap_compiled: float
    overlap_nanotron: float
    host_link_bytes_per_second: float
    host_bytes_per_second: float
    accumulated_host_bytes_per_second: float
    # memory
    context_bytes: float
    communicator_bytes: float
    cpu_framework_bytes: float
    driver_share: float
    fragmentation: float
    backward_share: float
    logit_bytes_auto: float
    logit_bytes_hf: float
    logit_bytes_megatron: float
    logit_bytes_compiled: float
    memory_headroom: float

    def score_passes(self, kernels: str) -> float:
        return self._of(KERNEL_TRAFFIC[kernels].constants, "score_passes")

    def logit_traffic_bytes(self, kernels: str) -> float:
        return self._of(KERNEL_TRAFFIC[kernels].constants, "logit_traffic_bytes")

    def kernels_per_layer(self, kernels: str) -> float:
        return self._of(KERNEL_TRAFFIC[kernels].constants, "kernels_per_layer")

    def logit_bytes(self, kernels: str) -> float:
        return self._of(kernels, "logit_bytes")

    def overlap(self, traffic: str) -> float:
        """traffic: of engines.engine.Traits."""
        return self._of(traffic, "overlap")

    def _of(self, kernels: str, name: str) -> float:
        value: float = getattr(self, f"{name}_{kernels}")
        return value


@functools.cache
def constant_entries() -> dict[str, ConstantEntry]:
    text = resources.files("shardwright.cost").joinpath("constants.json").read_text("utf-8")
    entries: dict[str, ConstantEntry] = json.loads(text)["constants"]
    return entries


@functools.cache
def default_constants() -> Constants:
    return Constants(**{name: entry["value"] for name, entry in constant_entries().items()})
