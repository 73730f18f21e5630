"""The zero_optimization section of ds_config.json, decided with the plan."""

from __future__ import annotations

from shardwright.layout.layout import Layout
from shardwright.layout.zero_buckets import BUCKET_NUMEL, LIVE_NUMEL, PREFETCH_NUMEL
from shardwright.layout.zero_hpz_key import HPZ
from shardwright.utils.json_types import JsonObject, JsonValue


def zero_section(strategy: Layout, *, numel: int, is_cpu: bool) -> JsonObject:
    """DeepSpeed's own defaults are written out where a run depends on them.

    numel: parameters of the fullest rank's part of the model. A gradient bucket, which is allocated
    whole, is not larger than that; the cost model counts it so.
    """
    # Pipelines ignore overlap_comm with a warning (DeepSpeed pipe/engine.py); a CPU has no second
    # stream.
    overlap = strategy.zero_stage >= 2 and not is_cpu
    if strategy.zero_stage == 0:
        return {"stage": 0}
    section: dict[str, JsonValue] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "reduce_scatter": True,
        "reduce_bucket_size": max(1, min(BUCKET_NUMEL, numel)),
    }
    if strategy.zero_stage < 3:
        section["allgather_bucket_size"] = BUCKET_NUMEL
    if strategy.zero_stage == 3:
        # 0: no parameter stays whole on each rank, so that the plan's bytes per rank are what is
        # resident.
        section["stage3_param_persistence_threshold"] = 0
        section["stage3_gather_16bit_weights_on_model_save"] = False
        section["stage3_prefetch_bucket_size"] = PREFETCH_NUMEL
        section["stage3_max_live_parameters"] = LIVE_NUMEL
        section["stage3_max_reuse_distance"] = LIVE_NUMEL
    if strategy.hpz_partition_size > 1:
        section[HPZ] = strategy.hpz_partition_size
    if strategy.offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": not is_cpu}
    if strategy.offload == "parameters":
        section["offload_param"] = {"device": "cpu", "pin_memory": not is_cpu}
    return section
