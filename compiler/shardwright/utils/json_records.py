"""Read JSON into frozen dataclasses, strictly, with msgspec; `dataclasses.asdict` is the way
back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

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
