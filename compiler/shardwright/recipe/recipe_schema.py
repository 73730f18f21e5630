"""Reads recipe.schema.json: the keys that a value may have and their defaults."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from shardwright.diagnostics import KeyPath
from shardwright.utils.json_values import JsonObject, JsonValue

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")


def schema_text() -> str:
    return SCHEMA_FILE.read_text(encoding="utf-8")


@functools.cache
def recipe_schema() -> JsonObject:
    return cast(JsonObject, json.loads(schema_text()))


def applicable_schemas(schema: JsonObject, value: JsonValue) -> Iterator[JsonObject]:
    """Yield the schema and every part of it ($ref, allOf, if/then/else, anyOf) that applies to this
    value."""
    yield schema
    fitting = (part for part in _objects(schema.get("anyOf")) if has_allowed_type(part, value))
    for part in (*schema_parts(schema, value), *fitting):
        yield from applicable_schemas(part, value)


def schema_parts(schema: JsonObject, value: JsonValue) -> Iterator[JsonObject]:
    """Yield the direct parts of a schema that the value has to fulfil too: $ref, allOf, then,
    else."""
    if "$ref" in schema:
        definitions = _object(recipe_schema()["$defs"])
        yield _object(definitions[str(schema["$ref"]).removeprefix("#/$defs/")])
    yield from _objects(schema.get("allOf"))
    if "if" in schema:
        # In this schema an `if` has only `required` and `properties: {key: {const}}`.
        condition, holds = _object(schema["if"]), True
        if isinstance(value, Mapping):
            required = cast(Sequence[str], condition.get("required", ()))
            values = _object(condition.get("properties", {})).items()
            holds = all(key in value for key in required) and all(
                value.get(key) == _object(sub).get("const") for key, sub in values
            )
        branch = schema.get("then" if holds else "else")
        if branch is not None:
            yield _object(branch)


def schema_properties(schema: JsonObject, value: JsonValue) -> dict[str, JsonObject]:
    """Map the keys that a mapping may have to their schemas, in the schema's order."""
    found: dict[str, JsonObject] = {}
    for part in applicable_schemas(schema, value):
        for key, sub in _object(part.get("properties", {})).items():
            found.setdefault(key, _object(sub))
    return found


def allows_other_keys(schema: JsonObject, value: JsonValue) -> bool:
    """Tell whether keys besides `properties` are allowed (model.config, launch.env)."""
    closed = ("additionalProperties", "unevaluatedProperties")
    return not any(
        part.get(word) is False for part in applicable_schemas(schema, value) for word in closed
    )


def allowed_types(schema: JsonObject, value: JsonValue = None) -> set[str]:
    """Return the JSON type names that the schema allows; every branch of anyOf counts."""
    found: set[str] = set()
    for part in applicable_schemas(schema, value):
        named = part.get("type")
        found |= {named} if isinstance(named, str) else set(cast(Sequence[str], named or ()))
        for branch in _objects(part.get("anyOf")):
            found |= allowed_types(branch, value)
    return found


def has_allowed_type(schema: JsonObject, value: JsonValue) -> bool:
    """Tell whether the value has a type that the schema allows, whatever its range or form."""
    allowed = allowed_types(schema)
    if "const" in schema:
        return value == schema["const"]
    return not allowed or bool(allowed & type_names(value))


def fits_choice(schema: JsonObject, value: JsonValue) -> bool:
    """Tell whether the value is one of the schema's `enum`."""
    return any(
        value in cast(Sequence[JsonValue], part.get("enum", ()))
        for part in applicable_schemas(schema, value)
    )


def type_names(value: JsonValue) -> set[str]:
    """Return the JSON types of a value: 2.0 is an integer too."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"object"} if isinstance(value, Mapping) else {"array"}


def schema_items(schema: JsonObject, value: JsonValue) -> JsonObject:
    return next(
        (_object(part["items"]) for part in applicable_schemas(schema, value) if "items" in part),
        {},
    )


def fill_in_defaults(schema: JsonObject, value: JsonValue) -> JsonValue:
    """Fill in every default, with keys in the schema's order, integers as int and numbers as float.

    Free mappings keep their own order. Invalid values stay as they are.
    """
    if isinstance(value, Mapping):
        known = schema_properties(schema, value)
        found: dict[str, JsonValue] = {}
        for key, sub in known.items():
            if key in value:
                given = value[key]
                # A section left empty (`launch:`), or a key whose null stands for another default.
                given = default_of(sub) if given is None else given
                found[key] = fill_in_defaults(sub, given)
            elif has_default(sub):
                found[key] = fill_in_defaults(sub, default_of(sub))
        if allows_other_keys(schema, value):
            extra = next(
                (
                    p["additionalProperties"]
                    for p in applicable_schemas(schema, value)
                    if "additionalProperties" in p
                ),
                {},
            )
            found |= {
                key: fill_in_defaults(_object(extra), value[key])
                for key in value
                if key not in known
            }
        return found
    if isinstance(value, list | tuple):
        return [fill_in_defaults(schema_items(schema, value), item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    allowed = allowed_types(schema)
    if "number" in allowed:
        return float(value)
    return int(value) if "integer" in allowed and "integer" in type_names(value) else value


def has_default(schema: JsonObject) -> bool:
    return any("default" in part for part in applicable_schemas(schema, None))


def default_of(schema: JsonObject) -> JsonValue:
    """Return the default; None where there is none (has_default tells the two apart)."""
    return next(
        (part["default"] for part in applicable_schemas(schema, None) if "default" in part), None
    )


def _object(value: JsonValue) -> JsonObject:
    return cast(JsonObject, value)


def _objects(value: JsonValue) -> Sequence[JsonObject]:
    return cast(Sequence[JsonObject], value or ())


FILL_IN = "FILL_IN"
"""Stands for a value that `import` cannot know; `check` reports each."""

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
    """Format a key path: ("training", "optimizer", "betas", 0) -> training.optimizer.betas[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the recipe"


def quote_text(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")


def describe_value(value: JsonValue, *, typed: bool = False) -> str:
    """Describe a value in a message; with its type where `typed`."""
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
    """Return the words for JSON types, without null and without integer where a wider type is
    there."""
    kept = names - {"null"} if len(names) > 1 else names
    kept = kept - {"integer"} if "number" in kept else kept
    return [words for type_name, words in _TYPES.items() if type_name in kept]


def join_with_or(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def close_choices(value: str, choices: Sequence[str]) -> list[str]:
    """Return the choice that `value` misspells, if any. Another number is no misspelling: fp8 is
    not fp32."""
    same = [choice for choice in choices if _digits(choice) == _digits(value)]
    return difflib.get_close_matches(value.lower(), same, n=1, cutoff=0.6)


def _digits(text: str) -> str:
    return "".join(character for character in text if character.isdigit())


def paths_of_key(key: str) -> list[tuple[str, ...]]:
    """Return the paths of all keys of this name, shallow ones first."""
    return list(_places().get(key.lower(), ()))


def path_of_synonym(key: str) -> tuple[str, ...] | None:
    """Return the path of the key that another tool calls by this name."""
    return _SYNONYMS.get(key.lower().replace("-", "_"))


@functools.cache
def _places() -> Mapping[str, Sequence[tuple[str, ...]]]:
    """Map the last part of each key to its paths, shallow ones first."""
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
