"""Type JSON without `Any`, write it strictly, and read it into frozen dataclasses with msgspec.

`dataclasses.asdict` is the way from a record back to JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

JsonScalar = str | int | float | bool | None
if TYPE_CHECKING:
    JsonValue = JsonScalar | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec reads no type that holds itself
JsonObject = Mapping[str, JsonValue]
JsonDocument = dict[str, object]
"""Describes an object that `strict_json` writes: JSON values, and records."""

# JSON that every parser takes: RFC 8259 has no NaN and no infinity, Python's `json` writes both.
#
# What others read (`--json`, run/*.json, run/*.jsonl) is written here.


def strict_json(value: object) -> str:
    """Write records, dataclasses among them, as one line of JSON. A number that is not finite is
    null, and `"finite": false` stands in the object that holds it, directly or in a list."""
    return json.dumps(_without_non_finite(value)[0], allow_nan=False)


def json_bytes(value: object) -> bytes:
    """A file of the compiled folder. Raises ValueError for a number that is not finite: it would be
    our mistake."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _without_non_finite(value: object) -> tuple[object, bool]:
    """(value, whether it holds finite numbers only). Objects inside answer for themselves."""
    if isinstance(value, float):
        return (value, True) if math.isfinite(value) else (None, False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        inside = {name: _without_non_finite(of) for name, of in value.items()}
        found = {name: of for name, (of, _) in inside.items()}
        return found if all(finite for _, finite in inside.values()) else {
            **found,
            "finite": False,
        }, True
    if isinstance(value, list | tuple):
        items = [_without_non_finite(item) for item in value]
        return [item for item, _ in items], all(finite for _, finite in items)
    return value, True


def canonical_hash(document: object) -> str:
    """sha256 (hex) of the JSON text with sorted keys and no spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


Record = TypeVar("Record")
_MAX_REASON_CHARACTERS = 500  # a key or a word from a stranger may be of any size


def read_record(kind: type[Record], value: object) -> Record:
    """Read the parsed JSON `value` as the annotations of `kind` say.

    An integer may stand for a float. Raises ValueError, with the path of the field, for an unknown
    key, a missing one and a value of another type.
    """
    try:
        record = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        raise ValueError(_at(path.strip("`$."), reason[0].lower() + reason[1:])) from None
    for path, key in _unknown_keys(value, record, ""):  # msgspec passes over them in dataclasses
        raise ValueError(_at(path, f"unknown key {key!r}"))
    return record


def _at(path: str, reason: str) -> str:
    shown = reason[:_MAX_REASON_CHARACTERS]
    return f"{path}: {shown}" if path else shown


def _unknown_keys(value: Any, record: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and dataclasses.is_dataclass(record):
        fields = {field.name for field in dataclasses.fields(record)}
        for key, item in value.items():
            if key in fields:
                yield from _unknown_keys(item, getattr(record, key), f"{path}.{key}".strip("."))
            else:
                yield path, key
    elif isinstance(value, Mapping) and isinstance(record, Mapping):
        for key, item in value.items():
            yield from _unknown_keys(item, record[key], f"{path}[{key!r}]")
    elif isinstance(record, tuple):
        for index, (item, below) in enumerate(zip(value, record, strict=True)):
            yield from _unknown_keys(item, below, f"{path}[{index}]")


def copy_shared_fields(kind: type[Record], source: object, /, **changes: object) -> Record:
    """Build a record of another kind from the fields that the two share and `changes`; the others
    take their defaults."""
    fields = [f for f in dataclasses.fields(cast(Any, kind)) if f.name not in changes]
    names = [f.name for f in fields if f.default is dataclasses.MISSING or hasattr(source, f.name)]
    return kind(**{name: getattr(source, name) for name in names}, **changes)
