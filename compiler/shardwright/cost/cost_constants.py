"""Load the cost model's constants that no data sheet gives, from constants.json.

Each entry has its unit, its meaning, its source or prior, and whether `make fit-cost` fits it. All
GPUs and models share them. No other file of cost/ holds such a constant.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import TypedDict


class ConstantEntry(TypedDict):
    """Describe one constant; prior_spread: how far the fit may move its logarithm, 0 if not
    fitted."""

    value: float
    unit: str
    prior: float
    prior_spread: float
    meaning: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Hold the values, which constants.json explains; the model takes them as an argument for
    the fit."""

    # matrix products
    gemm_efficiency: float
    tile_seconds: float
    watts_per_tflops: float
    width_alignment_efficiency: float
    load_alignment_efficiency: float
    # attention
    fused_attention_efficiency: float
    score_passes_hf: float
    score_passes_megatron: float
    score_passes_compiled: float
    # kernels that move memory
    memory_efficiency: float
    head_norm_unit_bytes_per_second: float
    low_precision_cast_bytes_hf: float
    low_precision_cast_bytes_megatron: float
    low_precision_cast_bytes_compiled: float
    low_precision_cast_bytes_rowwise: float
    unfused_cast_efficiency: float
    logit_traffic_bytes_hf: float
    logit_traffic_bytes_megatron: float
    logit_traffic_bytes_compiled: float
    optimizer_traffic_bytes: float
    # overhead of the host and the schedule
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
    expert_alltoall_efficiency: float
    deepep_inter_node_efficiency: float
    deepep_intra_node_efficiency: float
    expert_overlap_share: float
    expert_host_seconds_alltoall: float
    expert_host_seconds_deepep: float
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

    def of_family(self, name: str, family: str) -> float:
        """Return the constant of a family of kernels or engines (engines/run_profiles.py)."""
        value: float = getattr(self, f"{name}_{family}")
        return value


@functools.cache
def constant_entries() -> dict[str, ConstantEntry]:
    text = resources.files("shardwright.cost").joinpath("constants.json").read_text("utf-8")
    entries: dict[str, ConstantEntry] = json.loads(text)["constants"]
    return entries


@functools.cache
def default_constants() -> Constants:
    return Constants(**{name: entry["value"] for name, entry in constant_entries().items()})
