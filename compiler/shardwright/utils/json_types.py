"""JSON as a type, so that no `Any` is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import TypeAliasType

JsonScalar = str | int | float | bool | None
# A named alias: its recursion is resolved by whoever reads JSON into dataclasses (records.py).
JsonValue = TypeAliasType("JsonValue", "JsonScalar | Sequence[JsonValue] | Mapping[str, JsonValue]")
JsonObject = Mapping[str, JsonValue]
