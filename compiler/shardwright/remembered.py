"""What a search asks again and again is computed once, told apart by the values that it depends on, never by a name.

Functions whose arguments are those values take functools.lru_cache; the others name them here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST = 20_000
"""Results of one function; beyond them it starts anew."""


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
