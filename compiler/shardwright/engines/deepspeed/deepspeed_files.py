"""From a plan to DeepSpeed's files: what the compile calls (engines.engine.Lowering)."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic
from shardwright.engines.deepspeed.accelerate_files import accelerate_files
from shardwright.engines.deepspeed.autotp_config import autotp_config
from shardwright.engines.deepspeed.deepspeed_file_names import AUTOTP_FILE, DS_CONFIG
from shardwright.engines.deepspeed.ds_config import ds_config, validated_ds_config
from shardwright.engines.deepspeed.ds_config_zero import zero_section
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import ELEMENT_BYTES
from shardwright.utils.json_types import JsonObject
from shardwright.utils.strict_json import json_bytes


def zero_settings(plan: Plan) -> JsonObject:
    """zero_optimization, from the fullest rank's part of the model before ZeRO-3 shares it out."""
    parts = plan.strategy.shards if plan.strategy.zero_stage == 3 else 1
    held = (
        max(rank.parameter_bytes for rank in plan.ranks) // ELEMENT_BYTES[plan.training.precision]
    )
    return zero_section(plan.strategy, numel=held * parts, is_cpu=plan.is_cpu)


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """ds_config.json, and for scripts of the user's own what they can be given."""
    found = {DS_CONFIG: json_bytes(validated_ds_config(ds_config(plan)))}
    if plan.strategy.context > 1 or plan.strategy.expert > 1:
        # A script of one's own would feed each context rank rows of its own, and train experts
        # whole.
        return found, ()
    found |= accelerate_files(plan)
    autotp = autotp_config(plan)
    if isinstance(autotp, Diagnostic):
        return found, (autotp,)
    return found if autotp is None else {**found, AUTOTP_FILE: json_bytes(autotp)}, ()
