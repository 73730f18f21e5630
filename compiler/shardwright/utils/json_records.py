"""JSON -> frozen dataclasses, as their annotations say; `dataclasses.asdict` is the way back.

Strict: an unknown key, a missing one and a value of another type are refused, each with its place.
An integer may stand for a float. Made for the light commands: nothing is imported and no class is
looked at before it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from shardwright.utils.json_values import JsonValue

Record = TypeVar("Record")
Reader = Callable[[Any], Any]
_MAX_REASON_CHARACTERS = 500
"""Of what is told of a value: a stranger's may be of any size."""


class RecordError(ValueError):
    """why: what is wrong with the value. path: the keys that lead to it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why[:_MAX_REASON_CHARACTERS]
        self.path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {self.why}" if self.path else f"it {self.why}"


def read_record(kind: type[Record], value: object, **extra_fields: object) -> Record:
    """given: fields that no JSON holds, as they are. Raises RecordError, a ValueError."""
    if not isinstance(value, Mapping):
        raise RecordError("is not an object")
    readers, required = _fields(cast(Any, kind))
    values = dict(extra_fields)
    for key, item in value.items():
        if key not in readers or key in extra_fields:
            raise RecordError(f"has a key {key!r} of which {kind.__name__} knows nothing")
        try:
            values[key] = readers[key](item)
        except RecordError as error:
            error.path = (key, *error.path)
            raise
    if missing := [name for name in required if name not in values]:
        raise RecordError(f"lacks {', '.join(missing)}")
    return kind(**values)


def copy_shared_fields(kind: type[Record], source: object, /, **changes: object) -> Record:
    """A record of another kind with the fields that the two share; the others take their
    defaults."""
    fields = [f for f in dataclasses.fields(cast(Any, kind)) if f.name not in changes]
    names = [f.name for f in fields if f.default is dataclasses.MISSING or hasattr(source, f.name)]
    return kind(**{name: getattr(source, name) for name in names}, **changes)


@functools.cache
def _fields(kind: Any) -> tuple[Mapping[str, Reader], tuple[str, ...]]:
    """Each field's reader, and the names of those that have no default."""
    hints, none = get_type_hints(kind), dataclasses.MISSING
    fields = dataclasses.fields(kind)
    required = tuple(f.name for f in fields if f.default is none and f.default_factory is none)
    return {f.name: _reader(hints[f.name]) for f in fields}, required


def _reader(hint: Any) -> Reader:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return functools.partial(read_record, hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(
            [_reader(a) for a in arguments if a is not types.NoneType], types.NoneType in arguments
        )
    if origin is tuple:
        return _tuple(arguments)
    if origin in (dict, Mapping):
        return _mapping(_reader(arguments[1]))
    if origin is Literal:
        return _literal(arguments)
    if hint is JsonValue:
        return _identity
    raise TypeError(f"no JSON stands for {hint}")


def _identity(value: Any) -> Any:
    return value


def _exact_type(kind: type, name: str) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise RecordError(f"is {value!r}, not {name}")

    return read


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    raise RecordError(f"is {value!r}, not a number")


_SCALARS: dict[Any, Reader] = {
    str: _exact_type(str, "a text"),
    int: _exact_type(int, "a whole number"),
    bool: _exact_type(bool, "true or false"),
    float: _float,
}


def _union(readers: Sequence[Reader], optional: bool) -> Reader:
    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        for reader in readers[:-1]:
            try:
                return reader(value)
            except RecordError:
                pass
        return readers[-1](value)

    return read


def _tuple(arguments: Sequence[Any]) -> Reader:
    """tuple[X, ...] or tuple[X, Y]."""
    repeated = arguments[-1] is Ellipsis
    readers = [_reader(a) for a in arguments if a is not Ellipsis]

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise RecordError(f"is {value!r}, not a list")
        if repeated:
            return tuple(map(readers[0], value))
        if len(value) != len(readers):
            raise RecordError(f"has {len(value)} entries, not {len(readers)}")
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _mapping(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise RecordError(f"is {value!r}, not an object")
        return value if reader is _identity else {key: reader(item) for key, item in value.items()}

    return read


def _literal(words: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if value in words:
            return value
        raise RecordError(f"is {value!r}, not one of {', '.join(map(str, words))}")

    return read
