"""Convert words of TrainingArguments, TRL and example scripts to the recipe's model, data,
checkpoints.

Other words get a comment with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from shardwright.migrate.recipe_draft import (
    LONGEST_VALUE,
    ImportSources,
    as_count,
    as_integer,
    as_number,
    as_switch,
    as_text,
    redacted,
)
from shardwright.migrate.training_keys import SCHEDULE, SECTION, schedule_of, warmup_steps
from shardwright.migrate.training_programs import UNKNOWN_SCRIPT
from shardwright.recipe.learning_rate_schedules import SCHEDULES
from shardwright.recipe.objectives import PREFERENCE_KIND
from shardwright.utils.json_values import JsonObject, JsonValue
from shardwright.utils.shell_script import resolved_text

_ATTENTION = ("sdpa", "eager", "flash_attention_2")
_DATA_ARGUMENTS = (
    *(
        "dataset_name",
        "dataset",
        "datasets",
        "dataset_mixer",
        "dataset_mixture",
        "dataset_train_split",
        "pretraining_dataset",
        "dataset_path",
        "dataset_dir",
        "dataset_config_name",
        "data_path",
        "data_files",
    ),
    *(
        "train_file",
        "train_data",
        "training_file",
        "validation_file",
        "eval_file",
        "data",
        "train_files",
    ),
)
_MODEL_ARGUMENTS = (
    *("model_name_or_path", "model_name", "model_id", "model_path", "base_model", "model"),
    "hf_model_path",
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_RESUME = "`shardwright run --resume` says whether a run goes on"
_METRICS = "run/metrics.jsonl has every step"
_HUB = "`shardwright export` writes the folder; `hf upload` sends it"
_VALIDATION = "see `validation` in the recipe"
# Word -> why it is not carried.
REASONS: dict[str, str] = {
    **dict.fromkeys(("deepspeed", "deepspeed_config"), "the file that was read"),
    "output_dir": "a run lies in the folder that `shardwright compile -o` writes",
    **dict.fromkeys(("overwrite_output_dir", "resume_from_checkpoint"), _RESUME),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir"), _METRICS
    ),
    "do_train": "a run trains",
    **dict.fromkeys(("do_eval", "eval_steps", "eval_strategy", "evaluation_strategy"), _VALIDATION),
    "per_device_eval_batch_size": _VALIDATION,
    "local_rank": "the launcher gives it",
    "tf32": "PyTorch's own setting; not part of a recipe",
    "dtype": "weights are read in fp32 and trained in training.precision",
    "trust_remote_code": "a recipe names the model a second time instead: model.trust_remote_code",
    **dict.fromkeys(
        ("dataloader_num_workers", "preprocessing_num_workers"), "data is tokenized before the run"
    ),
    "gradient_checkpointing_kwargs": "recomputation is never re-entrant",
    "remove_unused_columns": "only the field that is trained on is read",
    "use_liger_kernel": "a recipe has no such key in this version",
    "neftune_noise_alpha": "noise on embeddings is not part of a recipe",
    "label_smoothing_factor": "the loss is the plain cross-entropy",
    **dict.fromkeys(
        ("ddp_timeout", "ddp_find_unused_parameters", "plot_loss"), "a recipe has no such key"
    ),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "use_dora"), "a recipe trains unquantized weights"
    ),
    **dict.fromkeys(
        ("weights_dtype", "torch_dtype"), "weights are read in fp32 and trained in precision"
    ),
    "fsdp_config": "compile shards by the layout",
    "bf16": "the other precision counts",
    "fp16": "the other precision counts",
    "config": "the file that was read",
    "accelerate_config": "parallelism.zero_stage says what is sharded",
    "chat_template": "data.template names a chat template",
    "fsdp_transformer_layer_cls_to_wrap": "compile shards by the layout",
    "fsdp_version": "compile shards by the layout",
    **dict.fromkeys(("hub_token", "hub_model_id", "hub_strategy"), _HUB),
    "group_by_length": "samples come in the order of data.shuffle",
    "push_to_hub": _HUB,
    "save_strategy": "checkpoint.every_steps says how often",
    "save_only_model": "a checkpoint holds all that a resumed run needs",
    "load_best_model_at_end": "every kept checkpoint can be exported",
    "attn_implementation": "a recipe has sdpa, eager and flash_attention_2",
}


def model(s: ImportSources, named: str | None) -> None:
    """Convert the model; named: by --model of the command line."""
    typed = s.word(as_text, *_MODEL_ARGUMENTS)
    if named is not None:
        s.draft.put("model.source", named, "--model", *((typed[0],) if typed else ()))
    elif typed is not None:
        s.draft.put("model.source", typed[1], typed[0])
    elif "model.source" in s.checkpoint:
        s.draft.put("model.source", *s.checkpoint["model.source"])
    elif "model.source" in s.unread:
        s.draft.ask("model.source", s.unread["model.source"])
    elif not s.ask_unread("model.source", *_MODEL_ARGUMENTS):
        shape = [
            redacted(s.settings[name].written, s.settings[name].text)
            for name in ("num_layers", "hidden_size", "num_attention_heads")
            if name in s.settings
        ]
        said = f"; its shape: {', '.join(shape)}" if shape else ""
        s.draft.ask("model.source", f"the model: a hub id such as Qwen/Qwen3-8B, or ./folder{said}")
    from_scratch = s.draft.values.get("target") == "megatron" and typed is None
    if from_scratch and s.hidden:
        s.draft.ask("model.weights", f"pretrained or random; {s.hidden}")
    elif from_scratch and "load" not in s.settings:
        s.draft.put("model.weights", "random", "no --load: it trains from scratch")
    elif from_scratch:
        s.draft.ask("model.weights", "pretrained or random; the run goes on from its own --load")
    else:
        s.draft.put("model.weights", "pretrained")
        s.draft.note(
            "model",
            "weights: pretrained goes on from the model's weights; `random` trains from scratch",
        )
    revision = s.word(as_text, "model_revision", "revision_of_model")
    if revision is not None and re.fullmatch(r"[A-Za-z0-9._/][A-Za-z0-9._/-]*", revision[1]):
        s.draft.put("model.revision", revision[1], revision[0])
    attention = s.word(as_text, "attn_implementation")
    if attention is not None and attention[1] in _ATTENTION:
        s.draft.put("model.attention", attention[1], attention[0])
    elif attention is not None and attention[1] == "auto":
        s.draft.take(attention[0], "model.attention")
    elif attention is not None:
        what = "sdpa, eager or flash_attention_2"
        s.draft.ask("model.attention", f"{what}; {s.settings['attn_implementation'].told()}")
        s.draft.take(attention[0], "model.attention")
    else:
        s.ask_unread("model.attention", "attn_implementation")


def data(s: ImportSources) -> None:
    said = [
        setting for name, setting in s.settings.items() if name.partition(".")[0] in _DATA_ARGUMENTS
    ]
    if s.draft.values.get("target") == "megatron" and _megatron_data(s):
        return
    told = "; ".join(redacted(setting.written, setting.text) for setting in said)
    owner = f"; {said[0].owner} has {told}" if told else ""
    if "training.objective.name" in s.draft.values:
        s.draft.put("data.kind", PREFERENCE_KIND, f"prompt, chosen and rejected{owner}")
    else:
        s.draft.ask("data.kind", f"text, jsonl, parquet, chat, tokens or megatron{owner}")
    s.draft.ask("data.path", "the files, relative to this one, such as data/*.jsonl")
    for setting in said:
        s.draft.take(setting.written, "data")
    s.settle("data.tokenizer", as_text, "tokenizer_name", "tokenizer_name_or_path", "tokenizer")
    s.settle("data.packing", as_switch, "packing")
    share = s.word(as_number, "validation_fraction")
    if share is not None and 0 < share[1] < 1:
        s.draft.put("validation.fraction", share[1], share[0])


def _megatron_data(s: ImportSources) -> bool:
    """Convert Megatron's data path where it is one; return whether it was."""
    path = s.settings.get("data_path")
    names = () if path is None else tuple(map(resolved_text, path.values))
    if path is None or len(names) != 1 or names[0] is None:
        return False
    s.draft.put("data.kind", "megatron", path.written)
    s.draft.put("data.path", names[0], path.written)
    tokenizer = s.word(as_text, "tokenizer_name", "tokenizer_model")
    if tokenizer is not None:
        s.draft.put("data.tokenizer", tokenizer[1], tokenizer[0])
    return True


def optional(s: ImportSources) -> None:
    """Convert the keys that a recipe may leave out."""
    if (part := s.settings.get("unfrozen_parameters")) is not None:
        s.draft.ask("model.freeze", part.told())
        s.draft.take(part.written, "model.freeze")
    _seed(s)
    _lora(s)
    s.settle("checkpoint.every_steps", as_count, "save_steps", "checkpointing_steps")
    s.settle("checkpoint.keep", as_count, "save_total_limit")
    _tracking(s)


def _seed(s: ImportSources) -> None:
    seed = s.word(as_integer, "seed")
    default = s.program.defaults.get("seed") if s.program is not None else None
    if seed is not None and 0 <= seed[1] < 2**32:
        s.draft.put("training.seed", seed[1], seed[0])
    elif not s.ask_unread("training.seed", "seed") and default is not None and s.program:
        s.draft.put("training.seed", default, f"{s.program.defaults_of}'s default")


def _tracking(s: ImportSources) -> None:
    trackers = s.settings.get("report_to")
    project = s.word(as_text, "wandb_project")
    named = s.command.environment.get("WANDB_PROJECT", "huggingface")
    for tracker in trackers.values if trackers is not None else ():
        if tracker == "tensorboard":
            s.draft.put("tracking.tensorboard", True, trackers.written if trackers else "")
        elif tracker == "wandb" and project is None:
            if "tracking.wandb.project" not in s.draft.values:
                origin = trackers.written if trackers is not None else ""
                s.draft.put("tracking.wandb.project", named, origin)
        elif tracker not in ("wandb", "none") and trackers is not None:
            what = redacted(trackers.written, tracker)
            s.draft.note("tracking", f"not carried, a recipe has tensorboard and wandb: {what}")
    if trackers is not None:
        s.draft.take(trackers.written, "tracking")
    if project is not None:
        s.draft.put("tracking.wandb.project", project[1], project[0])
        entity = s.word(as_text, "wandb_entity")
        if entity is not None:
            s.draft.put("tracking.wandb.entity", entity[1], entity[0])


def rest(s: ImportSources) -> None:
    """Comment on every setting that nothing has read."""
    own = s.program.reasons if s.program is not None else {}
    for name, setting in s.settings.items():
        if setting.written in s.draft.carried:
            continue
        plain = setting.written.lstrip("-")
        why = next(
            (
                table[key]
                for key in (plain, name, plain.partition(".")[0])
                for table in (own, REASONS)
                if key in table
            ),
            "a setting that a recipe does not have",
        )
        s.draft.leave("training", setting.written, setting.text, why)
    for word in s.command.hidden:
        s.draft.note("training", f"not read, words that only the shell knows: {word}")
    for value in s.command.rest:
        if value not in s.read_files:
            what = json.dumps(value)[:LONGEST_VALUE]
            s.draft.note("training", f"not carried, a word of the script without a name: {what}")


def name_of(s: ImportSources, fallback: str) -> str:
    typed = s.word(as_text, "run_name")
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", typed[1] if typed is not None else fallback).strip(
        "-."
    )[:64]
    if typed is not None:
        s.draft.take(typed[0], "name")
    return text if _NAME.fullmatch(text) else "imported"


def _lora(s: ImportSources) -> None:
    rank = s.word(as_count, "lora_r", "lora_rank")
    wanted = s.word(as_switch, "use_peft", "use_lora", "lora", "lora_enable")
    names = ("use_peft", "use_lora", "lora", "lora_enable")
    kind = next((s.settings[name] for name in names if name in s.settings), None)
    key = "model.freeze" if kind is not None and kind.text == "freeze" else "lora.rank"
    if wanted is None and s.ask_unread(key, *names):
        return
    is_on = wanted[1] if wanted is not None else None
    if wanted is not None:
        s.draft.take(wanted[0], "lora")
    if is_on is False or (rank is None and is_on is None and "lora_r" not in s.settings):
        return
    if s.draft.values.get(f"{SECTION}.name") == "adamw_8bit":
        # Adapters are small: moments in fp32 train at least as well.
        s.draft.values[f"{SECTION}.name"] = "adamw"
        s.draft.note(SECTION, "adapters have moments in fp32: adamw_8bit does not train them")
    if s.settle("lora.rank", as_count, "lora_r", "lora_rank") is None:
        s.draft.ask("lora.rank", "the rank of the adapters")
    s.settle("lora.alpha", as_number, "lora_alpha")
    program = s.program or UNKNOWN_SCRIPT
    origin = f"{program.name}'s default"
    default = None if s.hidden else program.lora_dropout
    s.settle("lora.dropout", as_number, "lora_dropout", otherwise=default, origin=origin)
    if "lora.alpha" not in s.draft.values:
        s.draft.ask("lora.alpha", "the scale of the adapters; its default is the program's own")
    modules = s.settings.get("lora_target_modules")
    if (every := s.word(as_switch, "lora_target_linear")) is not None and every[1]:
        s.draft.take(every[0], "lora.target_modules")  # auto: every linear layer
    found = [
        name
        for word in (modules.values if modules is not None else ())
        for name in re.split(r"[\s,]+", word)
        if re.fullmatch(r"[A-Za-z0-9._]+", name)
    ]
    if modules is not None and found and found != ["all"]:
        s.draft.put("lora.target_modules", list(dict.fromkeys(found)), modules.written)
    elif modules is not None:
        s.draft.take(modules.written, "lora.target_modules")  # auto: every linear layer


def _positive(value: JsonValue) -> float | None:
    number = as_number(value)
    return number if number is not None and number > 0 else None


def _not_negative(value: JsonValue) -> float | None:
    number = as_number(value)
    return number if number is not None and number >= 0 else None


def _curve_type(value: JsonValue) -> str | None:
    return value if isinstance(value, str) and value in ("linear", "cosine", "1-sqrt") else None


_SCHEDULE_ARGUMENTS: dict[str, tuple[str, Callable[[JsonValue], float | str | None]]] = {
    "min_lr": ("min_lr", _not_negative),
    "min_lr_rate": ("min_lr_ratio", _not_negative),
    "min_lr_ratio": ("min_lr_ratio", _not_negative),
    "num_decay_steps": ("decay_steps", as_count),
    "num_cycles": ("num_cycles", _positive),
    "power": ("power", _positive),
    "lr_end": ("lr_end", _not_negative),
    "timescale": ("timescale", as_count),
    "warmup_lr_rate": ("warmup_lr_rate", _not_negative),
    "warmup_type": ("warmup_type", _curve_type),
    "decay_type": ("decay_type", _curve_type),
}
"""Maps an argument of transformers' schedulers to the recipe's key and its reader."""


def _fills_the_run(s: ImportSources, found: JsonObject) -> bool:
    """Return whether warm-up, stable and decay steps are all steps, as in a recipe."""
    steps, warmup = s.draft.values.get("training.steps"), warmup_steps(s)
    parts = (warmup, as_count(found["num_stable_steps"]), as_count(found.get("num_decay_steps")))
    return None not in parts and sum(part or 0 for part in parts) == steps


def kwargs(s: ImportSources) -> None:
    """Convert lr_scheduler_kwargs (JSON), the arguments that the schedule takes."""
    setting = s.settings.get("lr_scheduler_kwargs")
    if setting is None:
        return
    try:
        found = json.loads(setting.text)
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict):
        return
    curve = schedule_of(s)
    taken = SCHEDULES[curve].keys if curve not in (None, "constant") else ()
    unknown: list[str] = []
    for name, value in found.items():
        key, read = _SCHEDULE_ARGUMENTS.get(name, ("", _positive))
        if value is None and key:
            continue
        if key not in taken or (given := read(value)) is None:
            unknown.append(name)
        else:
            s.draft.put(f"{SCHEDULE}.{key}", given, setting.written)
    if "num_stable_steps" in found and "decay_steps" in taken:
        if _fills_the_run(s, found):
            unknown.remove("num_stable_steps")
        else:
            s.draft.ask(
                f"{SCHEDULE}.decay_steps",
                "updates of the decay at the end, which begins where num_stable_steps "
                f"{found['num_stable_steps']} end",
            )
    if unknown and setting.written in s.draft.carried:
        s.draft.note(SCHEDULE, f"not carried of {setting.written}: {', '.join(unknown)}")
