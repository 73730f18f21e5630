"""Convert ds_config's engine keys: precision, ZeRO, offload, checkpointing, monitors, buffers.

Keys without a recipe key get a comment with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from shardwright.engines.deepspeed.ds_config import EXTRA_KEYS_ALLOWED
from shardwright.engines.deepspeed.ds_config_schema import (
    AUTO,
    ds_config_schema,
    is_comment_key,
    properties,
)
from shardwright.layout.formats import format_spelled
from shardwright.lint.ds_config_key_rules import REMOVED_KEYS
from shardwright.migrate.recipe_draft import ImportSources, as_integer, as_switch, as_text
from shardwright.recipe.recipe_parser import MAX_RECIPE_DEPTH
from shardwright.utils.file_io import is_nested_too_deeply
from shardwright.utils.json_values import JsonObject, JsonValue

ZERO = "zero_optimization"
ZERO_STAGE, OFFLOAD, PRECISION = (
    "parallelism.zero_stage",
    "parallelism.offload",
    "training.precision",
)
RECOMPUTE = "parallelism.activation_checkpointing"

_PLAN_WRITES = "compile writes it by the layout"
_QUANTIZED = "quantized communication changes what is trained"
_LOSS_IS_MEAN = "the loss is the mean over all predicted tokens"
_NO_RECIPE_KEY = "a recipe has no such key"
# Key or section of ds_config -> why it is not carried; the longest that fits counts.
REASONS: dict[str, str] = {
    **{
        f"{ZERO}.{key}": _PLAN_WRITES
        for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter")
    },
    f"{ZERO}.stage3_param_persistence_threshold": (
        "compile writes 0, so that the memory it predicts is what is used"
    ),
    f"{ZERO}.stage3_model_persistence_threshold": "compile keeps no parameter whole on each rank",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": (
        "checkpoints are whole in any layout; `shardwright export`"
    ),
    f"{ZERO}.zero_hpz_partition_size": (
        "compile chooses the second copy of the weights by the layout"
    ),
    **{
        f"{ZERO}.zero_quantized_{what}": _QUANTIZED
        for what in ("weights", "gradients", "nontrainable_weights")
    },
    f"{ZERO}.round_robin_gradients": "it reorders what checkpoints are cut from",
    f"{ZERO}.elastic_checkpoint": "every checkpoint resumes in any layout",
    f"{ZERO}.load_from_fp32_weights": "every checkpoint resumes from its fp32 weights",
    **{
        f"{ZERO}.offload_{what}": "parallelism.offload has no such detail"
        for what in ("optimizer", "param")
    },
    f"{ZERO}.cpu_offload_use_pin_memory": "compile pins host memory where there is a GPU",
    ZERO: "compile does not pass it on",
    "activation_checkpointing": (
        "layers are recomputed by torch, each whole; this is of DeepSpeed's own checkpointing"
    ),
    "autotuning": "`shardwright plan` searches the layouts",
    "checkpoint": "checkpoints are whole in any layout; see `checkpoint` in the recipe",
    "communication_data_type": "gradients are summed in training.gradient_accumulation_dtype",
    "compile": "torch.compile is not part of a run yet",
    "data_efficiency": "curricula and dynamic batching are not part of a recipe",
    "data_parallel_size": "it follows from the world and the other degrees",
    "data_types": "parameters have training.precision, the optimizer's states fp32",
    "dataloader_drop_last": "an epoch ends with its last full batch",
    "expert_parallel": "set parallelism.expert by hand: DeepSpeed's AutoEP is not used",
    "bf16": "compile writes the precision's section",
    "fp16": "compile writes the precision's section; the scale's keys stand in `extra`",
    "hybrid_engine": "it is for generation during training",
    "pipeline": "compile writes the section by the layout",
    **dict.fromkeys(
        ("gradient_allreduce_op", "gradient_predivide_factor", "prescale_gradients"), _LOSS_IS_MEAN
    ),
    "seq_parallel_communication_data_type": "sequence parallelism is not part of a run yet",
    "sequence_parallel_size": (
        "set parallelism.context by hand: to DeepSpeed those ranks are data ranks"
    ),
    "tensor_parallel": "compile makes a map of its own: see tensor_parallel in plan.json",
    "torch_autocast": "parameters have training.precision; there is no autocast",
    "tensorboard": "the events go to run/tensorboard",
    "wandb": "tracking.wandb has project, entity and name",
    "weight_quantization": "it is for inference",
    "zero_allow_untested_optimizer": "AdamW is tested",
    "zero_force_ds_cpu_optimizer": "compile takes CPUAdam where the states are in host memory",
}


def zero(s: ImportSources) -> None:
    old = s.get(ZERO)
    if isinstance(old, bool):
        s.draft.put(ZERO_STAGE, int(old), ZERO)
        stage: int | None = int(old)
    else:
        stage = s.settle(ZERO_STAGE, as_integer, "zero_stage", dotted=f"{ZERO}.stage")
        if stage is None and s.has(f"{ZERO}.stage"):
            s.unanswered(ZERO_STAGE, f"{ZERO}.stage", "the ZeRO stage, 0 to 3")
        elif stage is None:
            s.draft.put(ZERO_STAGE, 0, "DeepSpeed's default")
            stage = 0
    if stage == 0 and (
        s.draft.values.get(PRECISION) != "fp32" or s.draft.values.get("parallelism.pipeline") != 1
    ):
        why = (
            "stage 0 sums in half precision and clips a pipeline by part of its norm; stage 1 is "
            "the same, without that"
        )
        source = s.draft.origins.pop(ZERO_STAGE, "")
        s.draft.put(ZERO_STAGE, 1, "DeepSpeed's stage 0, without its drift")
        if s.draft.carried.pop(source, None) is not None and s.has(source):
            s.draft.leave("parallelism", source, s.get(source), why)
        else:
            s.draft.note("parallelism", f"zero_stage: {why}")
        stage = 1
    _offload(s, stage)


def _offload(s: ImportSources, stage: int | None) -> None:
    device = dict[str, str]()
    for what, words in (
        ("offload_optimizer", "offload_optimizer_device"),
        ("offload_param", "offload_param_device"),
    ):
        path, old = (
            f"{ZERO}.{what}",
            f"{ZERO}.cpu_offload" + ("_param" if what == "offload_param" else ""),
        )
        given = as_text(s.get(f"{path}.device"))
        typed = s.word(as_text, words)
        found = given or (typed[1] if typed else None) or ("cpu" if s.get(old) is True else "none")
        device[what] = found.lower()
        if found.lower() == "nvme":
            s.draft.note(
                "parallelism",
                f"{path}.device: nvme becomes host memory; there is no offload to NVMe",
            )
        for source in (f"{path}.device", old):
            if s.has(source):
                s.draft.take(source, OFFLOAD)
        if typed is not None:
            s.draft.take(typed[0], OFFLOAD)
        if not s.section(path) and s.has(path):
            s.draft.take(path, OFFLOAD)
    offloaded = "optimizer" if device["offload_optimizer"] != "none" and stage else "none"
    if device["offload_param"] != "none" and stage == 3:
        offloaded = "parameters"
        if device["offload_optimizer"] == "none":
            s.draft.note(
                "parallelism", "offload: parameters takes the optimizer's states to host memory too"
            )
    elif device["offload_param"] != "none":
        s.draft.note("parallelism", f"{ZERO}.offload_param does nothing below stage 3")
    s.draft.put(OFFLOAD, offloaded)
    if offloaded != "none":
        s.draft.note(
            "cluster", "host_memory_gib: of a node; say how much there is, for what is offloaded"
        )


def precision(s: ImportSources) -> None:
    found = None
    for name, section in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        path = f"{section}.enabled"
        if found is None and as_switch(s.get(path)):
            found = name
            s.draft.put(PRECISION, name, path)
        elif (
            found is None
            and s.get(path) is None
            and (typed := s.word(as_switch, name))
            and typed[1]
        ):
            found = name
            s.draft.put(PRECISION, name, typed[0])
        if s.has(path):
            s.draft.take(path, PRECISION)
    mixed = s.word(as_text, "mixed_precision")
    if found is None and mixed is not None and mixed[1].lower() in ("bf16", "fp16"):
        found = mixed[1].lower()
        s.draft.put(PRECISION, found, mixed[0])
    if mixed is not None:
        s.draft.take(mixed[0], PRECISION)
    if found is None and s.is_trainer and not s.has_command:
        s.draft.ask(PRECISION, "bf16, fp16 or fp32; the Trainer had it from --bf16 or --fp16")
    elif found is None:
        s.draft.put(PRECISION, "fp32", "neither bf16 nor fp16 is on")
    for word in ("bf16", "fp16"):
        if word in s.command.words:
            s.draft.take(f"--{word}", PRECISION)
    path, key = "data_types.grad_accum_dtype", "training.gradient_accumulation_dtype"
    given = format_spelled(s.get(path))
    if given is not None and given in ("fp32", found):
        s.draft.put(key, given, path)
    elif found == "bf16":
        s.draft.note(
            "training",
            "gradients: DeepSpeed sums them in bf16 unless told; a recipe's auto is fp32",
        )


def recomputation(s: ImportSources) -> None:
    typed = s.word(as_switch, "gradient_checkpointing", "activation_checkpointing")
    interval = s.integer("pipeline.activation_checkpoint_interval")
    section = s.section("activation_checkpointing")
    if typed is not None:
        s.draft.put(RECOMPUTE, "full" if typed[1] else "none", typed[0])
    elif interval is not None:
        s.draft.put(
            RECOMPUTE, "full" if interval else "none", "pipeline.activation_checkpoint_interval"
        )
        if interval > 1:
            s.draft.note(
                "parallelism",
                f"activation checkpointing: each layer is recomputed, not {interval} at once",
            )
    elif section and not s.is_trainer:
        s.draft.put(
            RECOMPUTE,
            "full",
            "activation_checkpointing: the script calls DeepSpeed's checkpointing",
        )
    elif s.is_trainer and s.has_command:
        s.draft.put(RECOMPUTE, "none", "the Trainer's default")


def monitors(s: ImportSources) -> None:
    if s.has("tensorboard"):
        s.draft.put(
            "tracking.tensorboard",
            as_switch(s.get("tensorboard.enabled")) is True,
            "tensorboard.enabled",
        )
    if as_switch(s.get("wandb.enabled")):
        s.draft.put(
            "tracking.wandb.project",
            as_text(s.get("wandb.project")) or "deepspeed",
            "wandb.project",
        )
        if (team := as_text(s.get("wandb.team"))) is not None:
            s.draft.put("tracking.wandb.entity", team, "wandb.team")
    if s.has("wandb.enabled"):
        s.draft.take("wandb.enabled", "tracking.wandb")


def convert_extra_keys(s: ImportSources, refused: Mapping[str, str]) -> None:
    """Convert `extra`, and comment on the rest.

    refused: what lint finds wrong, by key
    """
    extra: dict[str, JsonValue] = {}
    zero_stage = s.draft.values.get(ZERO_STAGE)
    for path, value in leaf_keys(s.config, ()):
        dotted = ".".join(path)
        if any(".".join(path[:n]) in s.draft.carried for n in range(1, len(path) + 1)):
            continue
        allowed = documented_key(path)
        why = (
            ""
            if any(".".join(allowed[:n]) in EXTRA_KEYS_ALLOWED for n in range(1, len(allowed) + 1))
            else reason(path)
        )
        if is_comment_key(path[-1]):
            why = "a comment of the file"
        elif path[0] == "fp16" and s.draft.values.get(PRECISION) != "fp16":
            why = "it scales losses of fp16"
        elif path[0] in ("tensorboard", "wandb"):
            why = REASONS[path[0]]
        elif is_nested_too_deeply(value, MAX_RECIPE_DEPTH - len(path) - 2):
            why = "it is nested deeper than a recipe may be"
        elif value == AUTO:
            why = "the Trainer filled it in; compile sizes it by the layout"
        elif path[0] == ZERO and allowed[-1].startswith("stage3_") and zero_stage != 3:
            why = f"it has no effect at ZeRO stage {zero_stage}"
        if why or dotted in refused:
            s.draft.leave(_SECTIONS.get(path[0], "extra"), dotted, value, refused.get(dotted, why))
            continue
        place = extra
        for part in allowed[:-1]:
            place = cast("dict[str, JsonValue]", place.setdefault(part, {}))
        place[allowed[-1]] = integral_if_exact(value)
        s.draft.take(dotted, "extra." + ".".join(allowed))
    if extra:
        s.draft.values["extra"] = extra


def leaf_keys(
    section: JsonObject, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaf_keys(value, (*path, key))
        else:
            yield (*path, key), value


def documented_key(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the documented name of a key that has two."""
    if path[0] != ZERO or len(path) < 2:
        return path
    known = properties(properties(ds_config_schema().schema)[ZERO]).get(path[1], {})
    return (ZERO, str(known.get("same_as", path[1])), *path[2:])


def reason(path: tuple[str, ...]) -> str:
    if path[0] in REMOVED_KEYS:
        return f"gone from DeepSpeed {ds_config_schema().version}. {REMOVED_KEYS[path[0]]}"
    named = (documented_key(path), path)
    return next(
        (
            REASONS[dotted]
            for p in named
            for n in range(len(p), 0, -1)
            if (dotted := ".".join(p[:n])) in REASONS
        ),
        _NO_RECIPE_KEY,
    )


def integral_if_exact(value: JsonValue) -> JsonValue:
    """Return 5e8 as an integer, as DeepSpeed reads it."""
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else value
    )


_SECTIONS: dict[str, str] = {
    **dict.fromkeys(
        (ZERO, "pipeline", "tensor_parallel", "activation_checkpointing"), "parallelism"
    ),
    **dict.fromkeys(
        ("sequence_parallel_size", "data_parallel_size", "expert_parallel", "autotuning"),
        "parallelism",
    ),
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "data_types", "torch_autocast"), "training"),
    **dict.fromkeys(
        ("communication_data_type", "gradient_predivide_factor", "prescale_gradients"), "training"
    ),
    **dict.fromkeys(
        ("optimizer", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        "training.optimizer",
    ),
    "scheduler": "training.scheduler",
    "data_efficiency": "data",
    "dataloader_drop_last": "data",
    "checkpoint": "checkpoint",
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), "tracking"),
}
