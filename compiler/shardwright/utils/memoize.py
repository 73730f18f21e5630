"""What a search asks again and again is computed once, told apart by the values that it depends on,
never by a name.

Functions whose arguments are those values take functools.lru_cache; the others name them here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

MOST = 20_000
"""Results of one function; beyond them it starts anew."""
MOST_SETTLED = 64
"""Sets of arguments, whole models among them, that stay alive for one key."""


class Settled:
    """A key whose hash is worked out once: what a search asks thousands of times is the same of all
    its layouts."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Settled) and self._key == other._key)


def settled(key: Callable[[*Ts], Hashable]) -> Callable[[*Ts], Settled]:
    """key: of arguments that do not change, and that are the same objects from one question to the
    next."""
    known: dict[tuple[int, ...], tuple[object, Settled]] = {}

    def ask(*args: *Ts) -> Settled:
        asked = tuple(map(id, args))
        found = known.get(asked)
        if found is None:
            if len(known) >= MOST_SETTLED:
                known.clear()
            found = known[asked] = (
                args,
                Settled(key(*args)),
            )  # with the arguments, so that ids stay theirs
        return found[1]

    return ask


def remembered(key: Callable[P, Hashable]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """key: of the function's arguments, all that its result depends on."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known: dict[Hashable, R] = {}

        @functools.wraps(function)
        def ask(*args: P.args, **kwargs: P.kwargs) -> R:
            asked = key(*args, **kwargs)
            found = known.get(asked)
            if found is None:
                if len(known) >= MOST:
                    known.clear()
                found = known[asked] = function(*args, **kwargs)
            return found

        return ask

    return decorate
