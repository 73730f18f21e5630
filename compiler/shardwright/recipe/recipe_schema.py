"""The JSON Schema of a recipe (recipe.schema.json), and what it says about a value: its keys and
their defaults."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from shardwright.utils.json_types import JsonObject, JsonValue

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")


def schema_text() -> str:
    return SCHEMA_FILE.read_text(encoding="utf-8")


@functools.cache
def recipe_schema() -> JsonObject:
    return cast(JsonObject, json.loads(schema_text()))


def applicable_schemas(schema: JsonObject, value: JsonValue) -> Iterator[JsonObject]:
    """The schema and every part of it ($ref, allOf, if/then/else, the fitting anyOf) that speaks
    about this value."""
    yield schema
    if "$ref" in schema:
        yield from applicable_schemas(_definition(str(schema["$ref"])), value)
    for part in _objects(schema.get("allOf")):
        yield from applicable_schemas(part, value)
    if "if" in schema:
        branch = schema.get("then" if _holds(_object(schema["if"]), value) else "else")
        if branch is not None:
            yield from applicable_schemas(_object(branch), value)
    for part in _objects(schema.get("anyOf")):
        if has_allowed_type(part, value):
            yield from applicable_schemas(part, value)


def schema_properties(schema: JsonObject, value: JsonValue) -> dict[str, JsonObject]:
    """The keys that a mapping may have here -> their schemas, in the schema's order."""
    found: dict[str, JsonObject] = {}
    for part in applicable_schemas(schema, value):
        for key, sub in _object(part.get("properties", {})).items():
            found.setdefault(key, _object(sub))
    return found


def allows_other_keys(schema: JsonObject, value: JsonValue) -> bool:
    """Whether other keys than `properties` may stand here too (model.config, launch.env)."""
    closed = ("additionalProperties", "unevaluatedProperties")
    return not any(
        part.get(word) is False for part in applicable_schemas(schema, value) for word in closed
    )


def allowed_types(
    schema: JsonObject, value: JsonValue = None, *, any_branch: bool = True
) -> set[str]:
    """JSON type names that the schema allows; every branch of anyOf counts."""
    found: set[str] = set()
    for part in applicable_schemas(schema, value):
        named = part.get("type")
        found |= (
            {named}
            if isinstance(named, str)
            else {str(t) for t in cast(Sequence[str], named or ())}
        )
        if any_branch:
            for branch in _objects(part.get("anyOf")):
                found |= allowed_types(branch, value)
    return found


def has_allowed_type(schema: JsonObject, value: JsonValue) -> bool:
    """Whether the value has a type that the schema means; says nothing about ranges or forms."""
    allowed = allowed_types(schema)
    if "const" in schema:
        return value == schema["const"]
    return not allowed or bool(allowed & type_names(value))


def fits_choice(schema: JsonObject, value: JsonValue) -> bool:
    """Whether the value is one of the schema's `enum`."""
    return any(
        value in cast(Sequence[JsonValue], part.get("enum", ()))
        for part in applicable_schemas(schema, value)
    )


def type_names(value: JsonValue) -> set[str]:
    """The JSON types of a value: 2.0 is an integer too."""
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
    """The value with every default filled in, keys in the schema's order, integers as int and
    numbers as float.

    Free mappings keep their own order. Reads only what the schema knows, so that it works on
    invalid recipes too.
    """
    if isinstance(value, Mapping):
        return _complete_mapping(schema, value)
    if isinstance(value, list | tuple):
        return [fill_in_defaults(schema_items(schema, value), item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    allowed = allowed_types(schema)
    if "number" in allowed:
        return float(value)
    return int(value) if "integer" in allowed and "integer" in type_names(value) else value


def _complete_mapping(schema: JsonObject, value: JsonObject) -> JsonValue:
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
            key: fill_in_defaults(_object(extra), value[key]) for key in value if key not in known
        }
    return found


def has_default(schema: JsonObject) -> bool:
    return any("default" in part for part in applicable_schemas(schema, None))


def default_of(schema: JsonObject) -> JsonValue:
    """The default, None where there is none: the caller asks has_default where that matters."""
    return next(
        (part["default"] for part in applicable_schemas(schema, None) if "default" in part), None
    )


def _holds(condition: JsonObject, value: JsonValue) -> bool:
    """The `if` of our own schema: `required` and `properties: {key: {const}}` only; true of what is
    no mapping."""
    if not isinstance(value, Mapping):
        return True
    if any(key not in value for key in cast(Sequence[str], condition.get("required", ()))):
        return False
    allowed_types = _object(condition.get("properties", {}))
    return all(value.get(key) == _object(sub).get("const") for key, sub in allowed_types.items())


def _definition(reference: str) -> JsonObject:
    return _object(_object(recipe_schema()["$defs"])[reference.removeprefix("#/$defs/")])


def _object(value: JsonValue) -> JsonObject:
    return cast(JsonObject, value)


def _objects(value: JsonValue) -> Sequence[JsonObject]:
    return cast(Sequence[JsonObject], value or ())
