"""The zero_optimization section of ds_config.json, decided with the plan."""

from __future__ import annotations

from shardwright.ir.json_value import JsonObject, JsonValue
from shardwright.ir.strategy import Strategy


def zero_section(strategy: Strategy, *, is_cpu: bool) -> JsonObject:
    """DeepSpeed's own defaults are written out where a run depends on them."""
    # Pipelines ignore overlap_comm with a warning (DeepSpeed pipe/engine.py); a CPU has no second stream.
    overlap = strategy.zero_stage >= 2 and not is_cpu
    if strategy.zero_stage == 0:
        return {"stage": 0}
    section: dict[str, JsonValue] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "reduce_scatter": True,
    }
    if strategy.zero_stage == 3:
        # 0: no parameter stays whole on each rank, so that the plan's bytes per rank are what is resident.
        section["stage3_param_persistence_threshold"] = 0
        section["stage3_gather_16bit_weights_on_model_save"] = False
    if strategy.offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": not is_cpu}
    if strategy.offload == "parameters":
        section["offload_param"] = {"device": "cpu", "pin_memory": not is_cpu}
    return section
