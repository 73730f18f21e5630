"""accelerate/: the plan for scripts of the user's own, under the HF Trainer or Accelerate.

Data parallelism only: neither knows our tensor-parallel layers, and a pipeline needs its own
engine.

`shardwright run` does not read them. What the layout decides is written out, so that a script which
says otherwise is told so; what is the script's own business (learning rate, clipping) is "auto"
where the Trainer fills it in.
"""

from __future__ import annotations

from shardwright.engines.deepspeed.deepspeed_file_names import ACCELERATE
from shardwright.engines.deepspeed.ds_config import ds_config_for_user_scripts, validated_ds_config
from shardwright.engines.deepspeed.ds_config_extra import merge_ds_config
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonObject, JsonValue
from shardwright.utils.strict_json import json_bytes
from shardwright.utils.template_rendering import render_template

ACCELERATE_CONFIG = f"{ACCELERATE}/config.yaml"
ACCELERATE_DS_CONFIG = f"{ACCELERATE}/ds_config.json"
HF_TRAINER_DS_CONFIG = f"{ACCELERATE}/ds_config.trainer.json"


def accelerate_files(plan: Plan) -> dict[str, bytes]:
    if not plan.strategy.has_full_model_per_rank:
        return {}
    return {
        ACCELERATE_CONFIG: render_template("accelerate/config.yaml.j2", plan=plan).encode("utf-8"),
        ACCELERATE_DS_CONFIG: json_bytes(accelerate_ds_config(plan)),
        HF_TRAINER_DS_CONFIG: json_bytes(hf_trainer_ds_config(plan)),
    }


def accelerate_ds_config(plan: Plan) -> JsonObject:
    """For `accelerate launch`. No optimizer: the script has its own, and Accelerate refuses two."""
    return validated_ds_config(
        {key: value for key, value in _script_config(plan).items() if key != "optimizer"}
    )


def hf_trainer_ds_config(plan: Plan) -> JsonObject:
    """For TrainingArguments(deepspeed=...). The Trainer compares what is written out with its own
    arguments, and raises where they differ."""
    optimizer: JsonObject = {
        "type": "AdamW",
        "params": {
            **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            "torch_adam": plan.strategy.offload == "none" or plan.gpu == "cpu",
        },
    }
    return {**_script_config(plan), "gradient_clipping": "auto", "optimizer": optimizer}


def _script_config(plan: Plan) -> dict[str, JsonValue]:
    config = ds_config_for_user_scripts(plan)
    if plan.strategy.zero_stage == 3:
        # Trainer and Accelerate save by it; our own checkpoints do not.
        config = merge_ds_config(
            config, {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
        )
    # DeepSpeed works it out; the Trainer's own count is of one process where it looks before the
    # ranks have met.
    return {key: value for key, value in config.items() if key != "train_batch_size"}
