"""The arguments of a call as one tree: positional ones by number, keywords by name, containers
inside by path.

A path is "2", "attention_mask" or "position_embeddings.0"; tuples, lists and dictionaries are
walked, nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def leaves(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its path, in order."""
    args, kwargs = arguments
    yield from _leaves(args, "")
    yield from _leaves(kwargs, "")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        items: Iterator[tuple[Any, Any]] = iter(enumerate(value))
    elif isinstance(value, dict):
        items = iter(value.items())
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def replace_arguments(arguments: Arguments, values: Mapping[str, Any]) -> Arguments:
    """The same arguments with the values at these paths; containers beside a path are kept as they
    are."""
    args, kwargs = arguments
    for path, new in values.items():
        parts = path.split(".")
        if parts[0].isdecimal():
            args = _with(args, parts, new)
        else:
            kwargs = _with(kwargs, parts, new)
    return args, kwargs


def _with(container: Any, parts: list[str], new: Any) -> Any:
    head, rest = parts[0], parts[1:]
    if isinstance(container, dict):
        key = next(k for k in container if str(k) == head)
        return {**container, key: _with(container[key], rest, new) if rest else new}
    at = int(head)
    inner = _with(container[at], rest, new) if rest else new
    items = [*container[:at], inner, *container[at + 1 :]]
    if isinstance(container, list):
        return items
    return type(container)(*items) if hasattr(container, "_fields") else tuple(items)


def copy_containers(value: Any, memo: dict[int, Any]) -> Any:
    """A copy in which every mutable container is new, tensors and all else the same.

    memo: by id, so that one container handed to several layers stays one: that is how layers share
    state.
    """
    if isinstance(value, tuple):
        items = [copy_containers(v, memo) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list | MutableMapping):
        if id(value) not in memo:
            new = copy.copy(value)
            memo[id(value)] = new
            for key in range(len(new)) if isinstance(new, list) else list(new):
                new[key] = copy_containers(new[key], memo)
        return memo[id(value)]
    return value
