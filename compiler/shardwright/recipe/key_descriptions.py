"""Words for keys, values and types in diagnostics, and where a misplaced key belongs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence

from shardwright.diagnostics import KeyPath
from shardwright.recipe.recipe_schema import recipe_schema, schema_properties
from shardwright.utils.json_types import JsonObject, JsonValue

FILL_IN = "FILL_IN"
"""In place of a value that `import` cannot know; `check` names each."""

_TYPES: dict[str, str] = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping of keys",
    "null": "null",
}

# Names from other tools; the value is the key path here.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "max_lr", "lr"), ("training", "optimizer", "lr")),
    "adam_beta1": ("training", "optimizer", "betas"),
    **dict.fromkeys(("max_steps", "train_steps", "train_iters"), ("training", "steps")),
    "num_train_epochs": ("training", "epochs"),
    **dict.fromkeys(("train_batch_size", "batch_size"), ("training", "global_batch_size")),
    **dict.fromkeys(("seq_len", "seq_length", "max_length"), ("training", "sequence_length")),
    "max_grad_norm": ("training", "gradient_clipping"),
    **dict.fromkeys(("dtype", "bf16", "fp16"), ("training", "precision")),
    "lr_scheduler_type": ("training", "scheduler", "name"),
    "model_name_or_path": ("model", "source"),
    "save_steps": ("checkpoint", "every_steps"),
    "save_total_limit": ("checkpoint", "keep"),
    "output_dir": ("checkpoint", "directory"),
    "num_nodes": ("cluster", "nodes"),
    "num_gpus": ("cluster", "gpus_per_node"),
    **{
        word: ("parallelism", key)
        for key, words in {
            "tensor": ("tp", "tensor_parallel", "tensor_parallel_size"),
            "pipeline": ("pp", "pipeline_parallel_size"),
            "context": ("cp", "context_parallel_size", "ulysses", "sequence_parallel_size"),
            "data": ("dp",),
            "expert": ("ep", "expert_parallel_size", "expert_model_parallel_size", "ep_size"),
            "expert_tensor": ("etp", "expert_tensor_parallel_size"),
            "zero_stage": ("zero", "stage"),
            "activation_checkpointing": ("gradient_checkpointing",),
            "micro_batch_size": (
                "micro_batch",
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
            ),
        }.items()
        for word in words
    },
}


def dotted_key(path: KeyPath) -> str:
    """("training", "optimizer", "betas", 0) -> training.optimizer.betas[0]"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the recipe"


def quote_text(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")


def describe_value(value: JsonValue, *, typed: bool = False) -> str:
    """typed: with its type, for "got ..."."""
    if value is None:
        return "nothing" if typed else "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {quote_text(value)}" if typed else quote_text(value)
    if isinstance(value, int | float):
        return f"the number {value!r}" if typed else repr(value)
    if isinstance(value, Mapping):
        return "a mapping" if typed or value else "an empty mapping"
    return f"a list of {len(value)}" if typed else "a list"


def describe_types(names: set[str]) -> list[str]:
    """An integer is a number too; null is never suggested next to a real type."""
    kept = names - {"null"} if len(names) > 1 else names
    kept = kept - {"integer"} if "number" in kept else kept
    return [words for type_name, words in _TYPES.items() if type_name in kept]


def join_with_or(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def close_choices(value: str, choices: Sequence[str]) -> list[str]:
    """The one that `value` is a misspelling of, if any. Another number is no misspelling: fp8 is
    not fp32."""
    same = [choice for choice in choices if _digits(choice) == _digits(value)]
    return difflib.get_close_matches(value.lower(), same, n=1, cutoff=0.6)


def _digits(text: str) -> str:
    return "".join(character for character in text if character.isdigit())


def paths_of_key(key: str) -> list[tuple[str, ...]]:
    """Where a key of this name belongs, shallow places first."""
    return list(_places().get(key.lower(), ()))


def path_of_synonym(key: str) -> tuple[str, ...] | None:
    """What other tools call so."""
    return _SYNONYMS.get(key.lower().replace("-", "_"))


@functools.cache
def _places() -> Mapping[str, Sequence[tuple[str, ...]]]:
    """Last part of a key -> its paths, shallow ones first."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for path in sorted(dict.fromkeys(_walk(recipe_schema(), ())), key=len):
        found.setdefault(path[-1], []).append(path)
    return found


def _walk(schema: JsonObject, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    # These values open the branches of `data` that depend on one; elsewhere they change nothing.
    samples: tuple[JsonObject, ...] = ({}, {"kind": "jsonl"}, {"kind": "chat"}, {"mixture": []})
    known = {
        key: sub for sample in samples for key, sub in schema_properties(schema, sample).items()
    }
    for key, sub in known.items():
        if path != ("model", "config"):  # its keys are Hugging Face's, not ours
            yield (*path, key)
            yield from _walk(sub, (*path, key))
