"""Memoize by value, never by a name.

Functions whose arguments are those values take functools.lru_cache; the others name the values
here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

MAX_RESULTS = 20_000
"""Results of one function; beyond them it starts anew."""
MAX_HASHED_KEYS = 64
"""Sets of arguments, whole models among them, that stay alive for one key."""


class HashedKey:
    """A key whose hash is worked out once: what a search asks thousands of times is the same of all
    its layouts."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashedKey) and self._key == other._key)


def hashed_key(key: Callable[[*Ts], Hashable]) -> Callable[[*Ts], HashedKey]:
    """key: of arguments that do not change, and that are the same objects from one question to the
    next."""
    results: dict[tuple[int, ...], tuple[object, HashedKey]] = {}

    def cached(*args: *Ts) -> HashedKey:
        key_value = tuple(map(id, args))
        found = results.get(key_value)
        if found is None:
            if len(results) >= MAX_HASHED_KEYS:
                results.clear()
            found = results[key_value] = (
                args,
                HashedKey(key(*args)),
            )  # with the arguments, so that ids stay theirs
        return found[1]

    return cached


def memoize(key: Callable[P, Hashable]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """key: of the function's arguments, all that its result depends on."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        results: dict[Hashable, R] = {}

        @functools.wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> R:
            key_value = key(*args, **kwargs)
            found = results.get(key_value)
            if found is None:
                if len(results) >= MAX_RESULTS:
                    results.clear()
                found = results[key_value] = function(*args, **kwargs)
            return found

        return cached

    return decorate
