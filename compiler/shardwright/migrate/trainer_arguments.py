"""Convert words of TrainingArguments, TRL and example scripts to the recipe's model, data,
checkpoints.

Other words get a comment with the reason.
"""

from __future__ import annotations

import json
import re

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

_ATTENTION = ("sdpa", "eager", "flash_attention_2")
_DATA_ARGUMENTS = (
    *(
        "dataset_name",
        "dataset",
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
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_RESUME = "`shardwright run --resume` says whether a run goes on"
_METRICS = "run/metrics.jsonl has every step"
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
    **dict.fromkeys(
        ("torch_dtype", "dtype"), "weights are read in fp32 and trained in training.precision"
    ),
    "trust_remote_code": "a recipe names the model a second time instead: model.trust_remote_code",
    **dict.fromkeys(
        ("dataloader_num_workers", "preprocessing_num_workers"), "data is tokenized before the run"
    ),
    "gradient_checkpointing_kwargs": "recomputation is never re-entrant",
    "remove_unused_columns": "only the field that is trained on is read",
    "use_liger_kernel": "a recipe has no such key in this version",
    "neftune_noise_alpha": "noise on embeddings is not part of a recipe",
    "label_smoothing_factor": "the loss is the plain cross-entropy",
    "group_by_length": "samples come in the order of data.shuffle",
    "push_to_hub": "`shardwright export` writes the folder; `hf upload` sends it",
    "save_strategy": "checkpoint.every_steps says how often",
    "save_only_model": "a checkpoint holds all that a resumed run needs",
    "load_best_model_at_end": "every kept checkpoint can be exported",
    "attn_implementation": "a recipe has sdpa, eager and flash_attention_2",
}


def model(s: ImportSources, named: str | None) -> None:
    """Convert the model; named: by --model of the command line."""
    typed = s.word(
        as_text, "model_name_or_path", "model_name", "model_id", "model_path", "base_model", "model"
    )
    if named is not None:
        s.draft.put("model.source", named, "--model", *((typed[0],) if typed else ()))
    elif typed is not None:
        s.draft.put("model.source", typed[1], typed[0])
    else:
        s.draft.ask("model.source", "the model: a hub id such as Qwen/Qwen3-8B, or ./folder")
    s.draft.put("model.weights", "pretrained")
    s.draft.note(
        "model",
        "weights: pretrained goes on from the model's weights; `random` trains from scratch",
    )
    revision = s.word(as_text, "model_revision")
    if revision is not None and re.fullmatch(r"[A-Za-z0-9._/][A-Za-z0-9._/-]*", revision[1]):
        s.draft.put("model.revision", revision[1], revision[0])
    attention = s.word(as_text, "attn_implementation")
    if attention is not None and attention[1] in _ATTENTION:
        s.draft.put("model.attention", attention[1], attention[0])


def data(s: ImportSources) -> None:
    words = [
        (f"--{name}", s.command.words[name]) for name in _DATA_ARGUMENTS if name in s.command.words
    ]
    said = "; ".join(redacted(word, " ".join(values)) for word, values in words)
    s.draft.ask(
        "data.kind",
        "text, jsonl, parquet, chat, tokens or megatron"
        + (f"; the command has {said}" * bool(said)),
    )
    s.draft.ask("data.path", "the files, relative to this one, such as data/*.jsonl")
    for word, _ in words:
        s.draft.take(word, "data")
    s.settle("data.tokenizer", as_text, "tokenizer_name", "tokenizer_name_or_path", "tokenizer")
    s.settle("data.packing", as_switch, "packing")


def rest(s: ImportSources) -> None:
    seed = s.word(as_integer, "seed")
    if seed is not None and 0 <= seed[1] < 2**32:
        s.draft.put("training.seed", seed[1], seed[0])
    elif s.is_trainer and s.has_command:
        s.draft.put("training.seed", 42, "the Trainer's default")
    _lora(s)
    s.settle("checkpoint.every_steps", as_count, "save_steps", "checkpointing_steps")
    s.settle("checkpoint.keep", as_count, "save_total_limit")
    for tracker in s.command.words.get("report_to", ()):
        if tracker == "tensorboard":
            s.draft.put("tracking.tensorboard", True, "--report_to")
        elif tracker == "wandb" and "tracking.wandb.project" not in s.draft.values:
            project = s.command.environment.get("WANDB_PROJECT", "huggingface")
            s.draft.put("tracking.wandb.project", project, "--report_to")
        elif tracker not in ("wandb", "none"):
            what = redacted("--report_to", tracker)
            s.draft.note("tracking", f"not carried, a recipe has tensorboard and wandb: {what}")
    if "report_to" in s.command.words:
        s.draft.take("--report_to", "tracking")
    for name, values in s.command.words.items():
        if f"--{name}" not in s.draft.carried:
            why = REASONS.get(name, "a word of the script that a recipe does not have")
            s.draft.leave("training", f"--{name}", " ".join(values), why)
    for value in s.command.rest:
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
    if rank is None and (wanted is None or not wanted[1]):
        return
    s.draft.put(
        "lora.rank", rank[1] if rank is not None else 16, rank[0] if rank is not None else ""
    )
    if wanted is not None:
        s.draft.take(wanted[0], "lora")
    s.settle("lora.alpha", as_number, "lora_alpha")
    s.settle("lora.dropout", as_number, "lora_dropout")
    modules = s.command.words.get("lora_target_modules", ())
    names = [
        name
        for word in modules
        for name in re.split(r"[\s,]+", word)
        if re.fullmatch(r"[A-Za-z0-9._]+", name)
    ]
    if names and names != ["all-linear"]:
        s.draft.put("lora.target_modules", list(dict.fromkeys(names)), "--lora_target_modules")


def kwargs(s: ImportSources) -> None:
    """Convert --lr_scheduler_kwargs (JSON): the final learning rate of cosine_with_min_lr."""
    values = s.command.words.get("lr_scheduler_kwargs", ())
    try:
        found = json.loads(" ".join(values)) if values else {}
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict):
        return
    for name, key in (("min_lr", "min_lr"), ("min_lr_rate", "min_lr_ratio")):
        low = as_number(found.get(name))
        if low is not None and low >= 0 and set(found) == {name}:
            s.draft.put(f"training.scheduler.{key}", low, "--lr_scheduler_kwargs")
