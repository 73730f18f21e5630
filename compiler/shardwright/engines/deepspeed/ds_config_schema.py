"""Check ds_config.json against snapshots of DeepSpeed's schema, one JSON file a version.

`make generated` writes a snapshot from the installed DeepSpeed. A property is a small JSON Schema:
type, enum, minimum and its kin, properties, items. It has keywords of its own: `checked` (a
pydantic model of DeepSpeed reads the section: unknown keys raise, numbers in text are converted),
`any_case`, `exact` (0 and 1 are no booleans), `deprecated` (by which key), `same_as` (the other
name of a key), `open` (any keys), `auto` (the text "auto" is a value of DeepSpeed's own). An empty
type is anything; `python` is nothing that a file can hold.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from operator import ge, gt, le, lt
from typing import Literal, cast

from shardwright.utils.json_values import JsonObject, JsonValue

NEWEST = "0.19.8"


@dataclass(frozen=True, slots=True, kw_only=True)
class DsConfigSchema:
    """Describe what one DeepSpeed version accepts.

    schema: of the whole document
    removed: dotted keys that are refused because the feature is gone
    optimizers, schedulers: name -> {"params": names or None (unknown), "required": names, "zero" or
        "own": flag}
    optimizer_values, scheduler_values: the properties of their `params`
    """

    version: str
    schema: JsonObject
    removed: tuple[str, ...]
    optimizers: Mapping[str, JsonObject]
    schedulers: Mapping[str, JsonObject]
    optimizer_values: JsonObject
    scheduler_values: JsonObject


@functools.cache
def ds_config_schema(version: str = NEWEST) -> DsConfigSchema:
    """Read the snapshot of a DeepSpeed version."""
    folder = resources.files("shardwright.engines.deepspeed.ds_config_schemas")
    table = cast(
        "dict[str, JsonValue]", json.loads(folder.joinpath(f"{version}.json").read_text("utf-8"))
    )
    return DsConfigSchema(
        version=version,
        schema=cast(JsonObject, table["schema"]),
        removed=tuple(cast("list[str]", table["removed"])),
        optimizers=cast("Mapping[str, JsonObject]", table["optimizers"]),
        schedulers=cast("Mapping[str, JsonObject]", table["schedulers"]),
        optimizer_values=cast(JsonObject, table["optimizer_values"]),
        scheduler_values=cast(JsonObject, table["scheduler_values"]),
    )


Path = tuple[str | int, ...]
AUTO = "auto"

# DeepSpeed's pydantic models take these texts for booleans.
TRUE_WORDS = frozenset({"true", "yes", "on", "t", "y", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "f", "n", "0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaMismatch:
    """Describe a value or key that the schema does not accept.

    kind: unknown (a key), type, text (a number or boolean written as text), choice, range, auto
    schema: of the value; for an unknown key, of its section
    checked: DeepSpeed's own model reads the section
    """

    kind: Literal["unknown", "type", "text", "choice", "range", "auto"]
    path: Path
    value: JsonValue
    schema: JsonObject
    checked: bool


def schema_mismatches(document: JsonObject, snapshot: DsConfigSchema) -> tuple[SchemaMismatch, ...]:
    """Return the mismatches in document order.

    optimizer.params and scheduler.params are checked by their values' types alone: which names are
    known depends on the optimizer and scheduler.
    """
    found = list(_section(document, snapshot.schema, ()))
    for name, values in (
        ("optimizer", snapshot.optimizer_values),
        ("scheduler", snapshot.scheduler_values),
    ):
        section = document.get(name)
        params = section.get("params") if isinstance(section, Mapping) else None
        if isinstance(params, Mapping):
            for key, value in params.items():
                if key in values:
                    found += _value(
                        value, cast(JsonObject, values[key]), (name, "params", key), False
                    )
                elif value == AUTO:
                    found.append(
                        SchemaMismatch(
                            kind="auto",
                            path=(name, "params", key),
                            value=value,
                            schema={},
                            checked=False,
                        )
                    )
    return tuple(found)


def _section(value: JsonObject, schema: JsonObject, path: Path) -> Iterator[SchemaMismatch]:
    keys = properties(schema)
    checked = schema.get("checked") is True
    if schema.get("open") or (not keys and not path):
        return
    for key, below in value.items():
        known = keys.get(key)
        # Two names of one key: DeepSpeed's model takes either, and refuses both.
        twice = known is not None and known.get("same_as") in value
        if known is None or twice:
            if not is_comment_key(key):
                yield SchemaMismatch(
                    kind="unknown", path=(*path, key), value=below, schema=schema, checked=checked
                )
        else:
            yield from _value(below, known, (*path, key), checked)


def properties(schema: JsonObject) -> Mapping[str, JsonObject]:
    """Return the keys of a section and their schemas."""
    return cast("Mapping[str, JsonObject]", schema.get("properties", {}))


def is_comment_key(key: str) -> bool:
    """Return whether the key is a comment in a language that has none: "_comment", "//", "#"."""
    return key.startswith(("_", "//", "#")) or key.lower() in ("comment", "comments")


def _value(
    value: JsonValue, schema: JsonObject, path: Path, checked: bool
) -> Iterator[SchemaMismatch]:
    types = cast("list[str]", schema.get("type", []))
    kind: Literal["type", "text", "choice", "range", "auto"] | None = None
    if value == AUTO and not schema.get("auto"):
        kind = "auto"
    elif types and not any(
        has_json_type(value, name, exact=bool(schema.get("exact"))) for name in types
    ):
        kind = (
            "text"
            if isinstance(value, str) and number_or_bool_from_text(value, types) is not None
            else "type"
        )
    elif (
        "enum" in schema
        and value is not None
        and not isinstance(value, list)
        and not _is_choice(value, schema)
    ):
        kind = "choice"
    elif (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not in_range(value, schema)
    ):
        kind = "range"
    if kind is not None:
        yield SchemaMismatch(kind=kind, path=path, value=value, schema=schema, checked=checked)
    elif isinstance(value, Mapping) and "properties" in schema:
        yield from _section(value, schema, path)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _value(item, cast(JsonObject, schema["items"]), (*path, index), checked)


def has_json_type(value: JsonValue, name: str, *, exact: bool = False) -> bool:
    """Return whether a value has the JSON type.

    As DeepSpeed reads them, a whole float (1e9) is an integer, and 0 and 1 are booleans.
    """
    if name == "boolean":
        return isinstance(value, bool) or (not exact and isinstance(value, int) and value in (0, 1))
    if isinstance(value, bool):
        return False
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if name == "number":
        return isinstance(value, int | float)
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "array": list,
        "object": Mapping,
        "null": type(None),
    }
    return name in kinds and isinstance(value, kinds[name])


def number_or_bool_from_text(text: str, types: list[str]) -> int | float | bool | None:
    """Return the number or boolean that `text` spells, if one of `types` accepts it."""
    if "integer" in types or "number" in types:
        try:
            number = float(text)
        except ValueError:
            return None
        if number.is_integer() and abs(number) < 2**63:
            return int(number)
        return number if "number" in types and abs(number) < float("inf") else None
    if "boolean" in types:
        word = text.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    return None


def _is_choice(value: JsonValue, schema: JsonObject) -> bool:
    choices = cast("list[JsonValue]", schema["enum"])
    if schema.get("any_case") and isinstance(value, str):
        return value.lower() in {str(choice).lower() for choice in choices}
    return value in choices


_LIMITS = {
    "minimum": (ge, "of at least"),
    "exclusiveMinimum": (gt, "above"),
    "maximum": (le, "of at most"),
    "exclusiveMaximum": (lt, "below"),
}


def in_range(value: int | float, schema: JsonObject) -> bool:
    """Return whether a number is within the schema's limits."""
    limits = ((within, schema.get(key)) for key, (within, _) in _LIMITS.items())
    return all(within(value, limit) for within, limit in limits if isinstance(limit, int | float))


def limits_text(schema: JsonObject) -> str:
    """Return the schema's limits after "a number": `of at least 0 and below 1`."""
    return " and ".join(
        f"{text} {schema[key]}" for key, (_, text) in _LIMITS.items() if key in schema
    )
