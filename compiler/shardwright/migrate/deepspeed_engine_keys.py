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
from shardwright.migrate.recipe_draft import (
    ImportSources,
    Setting,
    as_integer,
    as_number,
    as_switch,
    as_text,
)
from shardwright.recipe.literal_types import RECOMPUTE_MODULES
from shardwright.recipe.recipe_parser import MAX_RECIPE_DEPTH
from shardwright.utils.file_io import is_nested_too_deeply
from shardwright.utils.json_values import JsonObject, JsonValue
from shardwright.utils.shell_script import resolved_text

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
    "sequence_parallel_size": "parallelism.context says how many ranks share a sequence",
    "tensor_parallel": "compile makes a map of its own: see tensor_parallel in plan.json",
    "torch_autocast": "parameters have training.precision; there is no autocast",
    "tensorboard": "the events go to run/tensorboard",
    "wandb": "tracking.wandb has project, entity and name",
    "weight_quantization": "it is for inference",
    "zero_allow_untested_optimizer": "AdamW is tested",
    "zero_force_ds_cpu_optimizer": "compile takes CPUAdam where the states are in host memory",
}


_HOST_MEMORY_NOTE = "host_memory_gib: of a node; say how much there is, for what is offloaded"


def zero(s: ImportSources) -> None:
    if s.is_deepspeed:
        s.draft.take(s.options["distributed_type"].written, ZERO_STAGE)
    if s.draft.values.get("target") == "megatron":
        _distributed_optimizer(s)
        _host_optimizer(s)
        return
    old = s.get(ZERO)
    if isinstance(old, bool):
        s.draft.put(ZERO_STAGE, int(old), ZERO)
        stage: int | None = int(old)
    elif "deepspeed" in s.unread:
        for key, what in ((ZERO_STAGE, "the ZeRO stage"), (OFFLOAD, "what is in host memory")):
            s.draft.ask(key, f"{what}; {s.unread['deepspeed']}")
        if (named := s.settings.get("deepspeed")) is not None:
            s.draft.take(named.written, ZERO_STAGE)
        return
    else:
        stage = s.settle(ZERO_STAGE, as_integer, "zero_stage", dotted=f"{ZERO}.stage")
        if ZERO_STAGE in s.draft.fill:
            pass
        elif stage is None and s.has(f"{ZERO}.stage"):
            s.unanswered(ZERO_STAGE, f"{ZERO}.stage", "the ZeRO stage, 0 to 3")
        elif stage is None and not s.has_document:
            stage = _stage_without_a_ds_config(s)
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
        s.draft.put(ZERO_STAGE, 1, "stage 0 of the run, without its drift")
        if s.draft.carried.pop(source, None) is not None and s.has(source):
            s.draft.leave("parallelism", source, s.get(source), why)
        else:
            if source.startswith("--"):
                s.draft.take(source, ZERO_STAGE)
            s.draft.note("parallelism", f"zero_stage: {why}")
        stage = 1
    if "deepspeed" not in s.unread and OFFLOAD not in s.draft.values:
        _offload(s, stage)


def _distributed_optimizer(s: ImportSources) -> None:
    """Convert Megatron-Core's distributed optimizer, which is ZeRO-1."""
    names = ("use_distributed_optimizer", "megatron_lm_use_distributed_optimizer")
    shards = s.word(as_switch, *names)
    if shards is not None:
        s.draft.put(ZERO_STAGE, int(shards[1]), shards[0])
    elif s.hidden:
        s.draft.ask(ZERO_STAGE, f"1 with a distributed optimizer, else 0; {s.hidden}")
    elif not s.ask_unread(ZERO_STAGE, *names):
        s.draft.put(ZERO_STAGE, 0, "no distributed optimizer")


def _host_optimizer(s: ImportSources) -> None:
    """Convert Megatron-Core's optimizer in host memory: a recipe keeps all of it there, or none.

    A fraction that is left out is 1.0 (megatron/training/arguments.py).
    """
    switch, fraction = "optimizer_cpu_offload", "optimizer_offload_fraction"
    held = s.word(as_switch, switch)
    if held is None:
        s.ask_unread(OFFLOAD, switch)
        return
    s.draft.take(held[0], OFFLOAD)
    part = s.word(as_number, fraction) or (held[0], 1.0)
    if not held[1]:
        s.draft.put(OFFLOAD, "none", held[0])
    elif s.settings.get(fraction) is not None and part[0] == held[0]:
        s.ask_unread(OFFLOAD, fraction)
    elif part[1] in (0, 1):
        s.draft.put(OFFLOAD, "optimizer" if part[1] else "none", part[0])
        s.draft.note("cluster", _HOST_MEMORY_NOTE)
    else:
        why = "a recipe keeps all of the optimizer's states in host memory, or none"
        s.draft.ask(OFFLOAD, f"optimizer or none; {part[0]} is {part[1]:g}, and {why}")
        s.draft.leave("parallelism", part[0], part[1], why)


# FSDP's sharding strategies, by name and number -> the ZeRO stage that shards the same.
_FSDP_STAGES = {
    **dict.fromkeys(("full_shard", "1", "hybrid_shard", "4"), 3),
    **dict.fromkeys(("shard_grad_op", "2", "hybrid_shard_zero2", "5"), 2),
    **dict.fromkeys(("no_shard", "3"), 0),
}


def _stage_without_a_ds_config(s: ImportSources) -> int | None:
    """Return the ZeRO stage that shards as FSDP or DDP does; None where nothing says it."""
    kind = s.word(as_text, "distributed_type")
    name = "" if kind is None else kind[1].upper()
    typed = s.setting("fsdp")
    if name == "FSDP" or typed is not None or s.setting("fsdp_version") is not None:
        version = s.setting("fsdp_version")
        for source in (kind[0] if kind is not None else "", version.written if version else ""):
            if source:
                s.draft.take(source, ZERO_STAGE)
        return _fsdp_stage(s, typed)
    if "distributed_type" in s.unread:
        s.draft.ask(ZERO_STAGE, f"the ZeRO stage; {s.unread['distributed_type']}")
        return None
    if "parallelism.zero_stage" in s.checkpoint:
        return None
    if "world_size" in s.checkpoint:
        s.draft.ask(ZERO_STAGE, "1 or 2; the names of DeepSpeed's files do not tell them apart")
        return None
    if s.hidden:
        s.draft.ask(ZERO_STAGE, f"the ZeRO stage, 0 to 3; {s.hidden}")
        return None
    if name == "DEEPSPEED":
        s.draft.ask(ZERO_STAGE, "the ZeRO stage; Accelerate's file does not say it")
        return None
    is_plain = name in ("MULTI_GPU", "NO", "MULTI_CPU") or (
        not name and s.command.launcher in ("torchrun", "python", "llamafactory-cli")
    )
    if is_plain and s.program is not None and s.program.name != "a script":
        s.draft.put(ZERO_STAGE, 0, "neither DeepSpeed nor FSDP is on")
        if kind is not None:
            s.draft.take(kind[0], ZERO_STAGE)
        return 0
    if s.command.launcher == "accelerate" and not name:
        s.draft.ask(ZERO_STAGE, "the ZeRO stage; without --config_file Accelerate reads its own")
        return None
    s.draft.ask(ZERO_STAGE, "the ZeRO stage, 0 to 3; no file and no word of the command says it")
    return None


def _fsdp_stage(s: ImportSources, typed: Setting | None) -> int | None:
    if typed is not None:
        words = typed.text.lower().split()
        stage = next((_FSDP_STAGES[word] for word in words if word in _FSDP_STAGES), None)
        if words == ["fsdp2"]:
            what = "3 where FSDP reshards after the forward pass, 2 where it does not"
            s.draft.ask(ZERO_STAGE, f"{what}; {typed.told()}")
            s.draft.take(typed.written, ZERO_STAGE)
            return None
        if stage is not None:
            s.draft.put(ZERO_STAGE, stage, f"{typed.written} {typed.text}", typed.written)
            if "offload" in words:
                s.draft.put(OFFLOAD, "parameters", typed.written)
            else:
                _fsdp_offload(s)
            return stage
    for name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        for spelled in (name, f"fsdp_config.{name.removeprefix('fsdp_')}", f"fsdp_config.{name}"):
            setting = s.setting(spelled)
            if setting is None:
                continue
            flag = as_switch(setting.text) if name.endswith("forward") else None
            stage = (3 if flag else 2) if flag is not None else None
            if stage is None:
                stage = _FSDP_STAGES.get(setting.text.lower())
            if stage is None:
                s.ask_unread(ZERO_STAGE, spelled)
                return None
            origin = f"{setting.written} {setting.text}"
            s.draft.put(ZERO_STAGE, stage, origin, setting.written)
            _fsdp_offload(s)
            if setting.text.lower().startswith("hybrid"):
                s.draft.note(
                    "parallelism", "zero_stage: hybrid sharding keeps a copy in each group of ranks"
                )
            return stage
    s.draft.ask(ZERO_STAGE, "3 where FSDP reshards after the forward pass, 2 where it does not")
    return None


def _fsdp_offload(s: ImportSources) -> None:
    names = (
        *("fsdp_offload_params", "fsdp_config.offload_params"),
        *("fsdp_config.cpu_offload", "fsdp_config.fsdp_offload_params"),
    )
    offload = s.word(as_switch, *names)
    if offload is not None:
        s.draft.put(OFFLOAD, "parameters" if offload[1] else "none", offload[0])
    else:
        s.ask_unread(OFFLOAD, *names)


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
        if given is None and typed is None and s.ask_unread(OFFLOAD, words):
            return
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
    if ZERO_STAGE in s.draft.fill and set(device.values()) == {"none"}:
        return
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
        s.draft.note("cluster", _HOST_MEMORY_NOTE)


def precision(s: ImportSources) -> None:
    found = _half_precision(s)
    for name in ("bf16", "fp16", "bfloat16"):
        if s.has(f"{name}.enabled"):
            s.draft.take(f"{name}.enabled", PRECISION)
        if name in s.settings and found is not None:
            s.draft.take(s.settings[name].written, PRECISION)
    mixed = s.setting("mixed_precision")
    if found is not None and mixed is not None:
        s.draft.take(mixed.written, PRECISION)
    if found is None:
        _precision_without_a_word(s, mixed)
    path, key = "data_types.grad_accum_dtype", "training.gradient_accumulation_dtype"
    given = format_spelled(s.get(path))
    if given is not None and given in ("fp32", found):
        s.draft.put(key, given, path)
    elif found == "bf16" and (s.has_document or s.is_deepspeed):
        s.draft.note(
            "training",
            "gradients: DeepSpeed sums them in bf16 unless told; a recipe's auto is fp32",
        )


def _half_precision(s: ImportSources) -> str | None:
    """Set bf16 or fp16 where a source turns it on; return which."""
    for name, section in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        path = f"{section}.enabled"
        if as_switch(s.get(path)):
            s.draft.put(PRECISION, name, path)
            return name
        typed = s.word(as_switch, name) if s.get(path) is None else None
        if typed is not None and typed[1]:
            s.draft.put(PRECISION, name, typed[0])
            return name
    mixed = s.word(as_text, "mixed_precision")
    if mixed is not None and mixed[1].lower() in ("bf16", "fp16"):
        s.draft.put(PRECISION, mixed[1].lower(), mixed[0])
        return mixed[1].lower()
    if PRECISION in s.checkpoint:
        s.draft.put(PRECISION, *s.checkpoint[PRECISION])
        return str(s.checkpoint[PRECISION][0])
    return None


def _precision_without_a_word(s: ImportSources, mixed: Setting | None) -> None:
    """Set fp32 where half precision is known to be off, else ask."""
    program = s.program
    unread = [
        name
        for name in ("bf16", "fp16")
        if name in s.settings and s.settings[name].read(as_switch) is None
    ]
    is_off = any(s.word(as_switch, name) is not None for name in ("bf16", "fp16"))
    no = mixed is not None and mixed.text.lower() in ("no", "fp32")
    if unread:
        s.ask_unread(PRECISION, *unread)
    elif "distributed_type" in s.unread:
        s.draft.ask(PRECISION, f"bf16, fp16 or fp32; {s.unread['distributed_type']}")
    elif mixed is not None and not no:
        s.ask_unread(PRECISION, "mixed_precision")
    elif any(f"{name}.enabled" in s.faulty for name in ("bf16", "fp16", "bfloat16")):
        name = next(n for n in ("bf16", "fp16", "bfloat16") if f"{n}.enabled" in s.faulty)
        s.ask_unread(PRECISION, dotted=f"{name}.enabled")
    elif s.is_trainer and program is None:
        s.draft.ask(PRECISION, "bf16, fp16 or fp32; the Trainer had it from --bf16 or --fp16")
    elif s.has_document or no or (program is not None and "bf16" in program.defaults):
        s.draft.put(PRECISION, "fp32", "neither bf16 nor fp16 is on")
    elif program is not None and "bf16" in program.unknown_defaults and not is_off:
        s.draft.ask(PRECISION, program.unknown_defaults["bf16"])
    elif is_off:
        s.draft.put(PRECISION, "fp32", "neither bf16 nor fp16 is on")
    else:
        s.draft.ask(PRECISION, "bf16, fp16 or fp32; no file and no word of the command says it")
    if PRECISION not in s.draft.fill:
        for name in ("bf16", "fp16"):
            if name in s.settings:
                s.draft.take(s.settings[name].written, PRECISION)
        if mixed is not None:
            s.draft.take(mixed.written, PRECISION)


# Megatron-Core's recomputation -> a recipe's.
_GRANULARITIES = {"full": "full", "selective": "selective"}
_RECOMPUTE_ARGUMENTS = (
    *("gradient_checkpointing", "activation_checkpointing", "fsdp_activation_checkpointing"),
    "megatron_lm_recompute_activations",
)


def _recomputed_modules(s: ImportSources) -> None:
    """Convert Megatron-Core's list of modules; left out, it is core_attn, which is `selective`."""
    found = s.settings.get("recompute_modules")
    if found is None or s.draft.values.get("target") != "megatron":
        return
    names = tuple(dict.fromkeys(map(resolved_text, found.values)))
    unknown = [name for name in names if name not in RECOMPUTE_MODULES]
    if not names or unknown:
        known = ", ".join(RECOMPUTE_MODULES)
        s.draft.ask(RECOMPUTE, f"{found.told()}; modules that a recipe lists are {known}")
        s.draft.take(found.written, RECOMPUTE)
        return
    s.draft.put(RECOMPUTE, list(names), found.written)


def recomputation(s: ImportSources) -> None:
    granularity = s.settings.get("recompute_granularity")
    if granularity is not None:
        kind = _GRANULARITIES.get(granularity.text)
        if kind is None:
            s.ask_unread(RECOMPUTE, "recompute_granularity")
        else:
            s.draft.put(RECOMPUTE, kind, granularity.written)
            if kind == "selective":
                _recomputed_modules(s)
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            if (detail := s.settings.get(name)) is not None:
                why = "each layer is recomputed by itself, all of them"
                s.draft.leave("parallelism", detail.written, detail.text, why)
        return
    typed = s.word(as_switch, *_RECOMPUTE_ARGUMENTS)
    interval = s.integer("pipeline.activation_checkpoint_interval")
    section = s.section("activation_checkpointing")
    program = s.program
    if typed is not None:
        is_selective = "recompute_activations" in typed[0]
        on = "selective" if is_selective else "full"
        s.draft.put(RECOMPUTE, on if typed[1] else "none", typed[0])
    elif s.ask_unread(RECOMPUTE, *_RECOMPUTE_ARGUMENTS):
        pass
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
    elif program is not None and "gradient_checkpointing" in program.defaults:
        s.draft.put(RECOMPUTE, "none", f"{program.defaults_of}'s default")
    elif program is not None and "gradient_checkpointing" in program.unknown_defaults:
        s.draft.ask(RECOMPUTE, program.unknown_defaults["gradient_checkpointing"])


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
