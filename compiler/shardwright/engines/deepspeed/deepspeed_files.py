"""Write DeepSpeed's files for a plan (engine_definition.Lowering)."""

from __future__ import annotations

import re

from shardwright.diagnostics import Diagnostic
from shardwright.engines.deepspeed.deepspeed_capabilities import ACCELERATE, AUTOTP_FILE, DS_CONFIG
from shardwright.engines.deepspeed.ds_config import (
    OWN_OPTIMIZERS,
    ds_config,
    ds_config_for_user_scripts,
    merge_ds_config,
    validated_ds_config,
    zero_section,
)
from shardwright.layout.formats import element_bytes
from shardwright.layout.parameter_sharding import ModuleSharding
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import JsonObject, JsonValue, json_bytes
from shardwright.utils.template_rendering import render_template

# accelerate/: the plan for users' own scripts, under the HF Trainer or Accelerate.
#
# Data parallelism only: neither knows our tensor-parallel layers, and a pipeline needs its own
# engine. `shardwright run` does not read these files. What the layout decides is written out, so
# that a script with other values gets an error; what the script decides (learning rate, clipping)
# is "auto" where the Trainer fills it in.

ACCELERATE_CONFIG = f"{ACCELERATE}/config.yaml"
ACCELERATE_DS_CONFIG = f"{ACCELERATE}/ds_config.json"
HF_TRAINER_DS_CONFIG = f"{ACCELERATE}/ds_config.trainer.json"


def accelerate_files(plan: Plan) -> dict[str, bytes]:
    """Return the files of accelerate/; none where a rank does not hold the full model."""
    if not plan.strategy.has_full_model_per_rank:
        return {}
    return {
        ACCELERATE_CONFIG: render_template("accelerate/config.yaml.j2", plan=plan).encode("utf-8"),
        ACCELERATE_DS_CONFIG: json_bytes(accelerate_ds_config(plan)),
        HF_TRAINER_DS_CONFIG: json_bytes(hf_trainer_ds_config(plan)),
    }


def accelerate_ds_config(plan: Plan) -> JsonObject:
    """Return the configuration for `accelerate launch`.

    It has no optimizer: the script brings its own, and Accelerate refuses two.
    """
    return validated_ds_config(
        {key: value for key, value in _script_config(plan).items() if key != "optimizer"}
    )


def hf_trainer_ds_config(plan: Plan) -> JsonObject:
    """Return the configuration for TrainingArguments(deepspeed=...).

    The Trainer compares values that are not "auto" with its own arguments, and raises where they
    differ.
    """
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
    # DeepSpeed computes it; the Trainer counts one process where it reads it before the process
    # group exists.
    return {key: value for key, value in config.items() if key != "train_batch_size"}


# ds_config.autotp.json: the plan's tensor-parallel map in DeepSpeed's own AutoTP grammar, for
# users' own scripts.
#
# `shardwright run` does not read it: a script that passes it to `deepspeed.initialize` with the
# plain Hugging Face model shards the same modules. It is written where there is no pipeline (AutoTP
# does not work on a PipelineModule).
#
# An input embedding is sharded only together with a head that is tied to it, and replicated
# otherwise: AutoTP has no vocabulary-parallel embedding alone. Modules with gathered outputs are
# refused: AutoTP divides the head counts of every module that holds a sharded parameter
# (auto_tp.py, update_mp_params), and their attention needs the full counts.

_HEAD_NAMES = ("lm_head", "embed_out")
"""Last parts of an output embedding's name that DeepSpeed's vocabulary-parallel head accepts by
default."""


AUTOTP_VERIFIED_TYPES = (
    "arcee",
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gpt_neox",
    "granite",
    "helium",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "mistral",
    "nanochat",
    "nemotron",
    "olmo",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Lists the model types that tests/launch/test_autotp.py trains under AutoTP.

AutoTP also changes head counts, which depends on a type's code.
"""


# style -> the rest of a layer spec (module_inject/autotp_config.py, TPLayerSpec)
_SPECS: dict[str, JsonObject] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    "packed_colwise": {"partition_type": "column"},
    "replicated": {"partition_type": "skip"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
    "vocabulary_embedding": {"partition_type": "skip"},
}


def autotp_config(plan: Plan) -> JsonObject | Diagnostic | None:
    """Return ds_config.autotp.json, None without tensor parallelism, or a warning (SW4101).

    The warning says why AutoTP cannot express the plan's tensor-parallel map.
    """
    degree = plan.tensor_parallel.degree
    if degree == 1 or plan.strategy.pipeline > 1 or plan.model.task_traits.scores_sequences:
        return None  # of a reward model AutoTP was not tried
    specs: dict[str, JsonObject] = {}
    head = ""
    for split in plan.tensor_parallel.modules:
        if split.style == "vocabulary_head":
            head = split.module
            continue
        why = _obstacle(split)
        if why:
            return _warning(f"{split.module} {why}")
        spec = _SPECS[split.style]
        if split.style == "packed_colwise":
            blocks = split.parameters[0].blocks
            count: JsonValue = len(blocks) if len(set(blocks)) == 1 else list(blocks)
            spec = {**spec, "shape": [count, -1], "partition_dim": 0}
        # AutoTP matches parameter names from their start; the pattern has any layer's number.
        name = re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(split.module))
        # Gradients are summed for every parameter of the module; only its weight is sharded.
        leaf = r".*" if split.style == "replicated_with_grad_allreduce" else "weight"
        if specs.setdefault(rf"^{name}\.{leaf}$", spec) != spec:
            return _warning(f"the plan shards {split.module} differently in other layers")
    if plan.model.model_type not in AUTOTP_VERIFIED_TYPES:
        return _warning(f"model_type {plan.model.model_type!r} is not verified under AutoTP")
    if head.rpartition(".")[2] not in _HEAD_NAMES:
        return _warning(f"AutoTP does not recognize the name {head!r} of the output embedding")
    kinds: list[JsonObject] = []
    for spec in specs.values():
        kinds += [spec] if spec not in kinds else []
    # Without an mpu DeepSpeed 0.19.8 counts the batch over all ranks, tensor ranks too, and asserts
    # on the true one (runtime/config.py, _batch_assertion): the numbers per rank are enough.
    rest = {
        key: value
        for key, value in ds_config_for_user_scripts(plan).items()
        if key != "train_batch_size"
    }
    section: JsonObject = {
        "autotp_size": degree,
        "vocab_parallel_lm_head": True,
        "partition_config": {
            "use_default_specs": False,
            "strict_mode": True,
            "layer_specs": [
                {"patterns": [p for p in specs if specs[p] == kind], **kind} for kind in kinds
            ],
        },
    }
    return validated_ds_config({**rest, "tensor_parallel": section})


def _obstacle(split: ModuleSharding) -> str:
    if split.style not in _SPECS:
        return f"has the tensor-parallel style {split.style}, which AutoTP does not support"
    matrices = [p for p in split.parameters if p.dimension is not None and len(p.shape) >= 2]
    if any(len(p.shape) > 2 for p in matrices):
        return "is a stack of matrices, which AutoTP does not shard"
    if split.style in ("colwise", "packed_colwise") and any(p.dimension != 0 for p in matrices):
        return "is a Conv1D, which AutoTP's partition_config takes for a Linear"
    return ""


def _warning(why: str) -> Diagnostic:
    return Diagnostic(
        code="SW4101",
        severity="warning",
        message=f"{AUTOTP_FILE} is not written: {why}",
        help=(
            "`shardwright run` does not need this file. Your own scripts cannot run this plan with "
            "DeepSpeed's AutoTP."
        ),
        key=("parallelism", "tensor"),
    )


def zero_settings(plan: Plan) -> JsonObject:
    """Return zero_optimization for the rank with the most parameters, before ZeRO-3 shards them."""
    parts = plan.strategy.zero_world_size if plan.strategy.zero_stage == 3 else 1
    held = max(rank.parameter_bytes for rank in plan.ranks) // element_bytes(
        plan.training.precision
    )
    return zero_section(plan.strategy, numel=held * parts, device=plan.device)


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """Return ds_config.json, and the files for users' own scripts that the layout allows."""
    found = {DS_CONFIG: json_bytes(validated_ds_config(ds_config(plan)))}
    if plan.strategy.context > 1 or plan.strategy.expert > 1:
        # A user's script would give each context rank its own sequences, and not shard experts.
        return found, ()
    if plan.optimizer.name in OWN_OPTIMIZERS:  # which are of this project's ranks
        return found, ()
    found |= accelerate_files(plan)
    autotp = autotp_config(plan)
    if isinstance(autotp, Diagnostic):
        return found, (autotp,)
    return found if autotp is None else {**found, AUTOTP_FILE: json_bytes(autotp)}, ()
