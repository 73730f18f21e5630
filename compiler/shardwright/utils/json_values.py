"""JSON as a type, so that no `Any` is needed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

JsonScalar = str | int | float | bool | None
if TYPE_CHECKING:
    JsonValue = JsonScalar | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec (json_records.py) reads no type that holds itself
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
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
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
