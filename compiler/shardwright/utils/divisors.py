"""Divisors: what degrees, micro-batches and batches can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors, ascending, in sqrt(n) steps: n may be the GPUs of a whole data
    centre."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return tuple(dict.fromkeys([*small, *(n // k for k in reversed(small))]))


def nearest_divisors(n: int, target: int, count: int = 3) -> tuple[int, ...]:
    """The `count` divisors of n nearest to `wanted`, ascending."""
    return tuple(sorted(sorted(divisors(n), key=lambda d: (abs(d - target), d))[:count]))


def nearest_multiples(n: int, target: int) -> tuple[int, ...]:
    """The multiples of n on both sides of `wanted`, above 0; `wanted` alone where it is one."""
    return tuple(m for m in dict.fromkeys((target // n * n, -(-target // n) * n)) if m > 0)


def degree_mismatch(
    degrees: Mapping[str, int], world: int, *, complete: bool, blamed: Iterable[str] = ()
) -> tuple[str, tuple[int, ...]] | None:
    """The degree to change, and what it could be with the others as they are; None where they make
    up the world.

    complete: these are all degrees, so that their product is the world; else it divides it. blamed:
    those that were asked for; any where there are none. The largest is the likeliest mistake.
    """
    product = math.prod(degrees.values())
    if product == world or not (complete or world % product):
        return None
    degree_name = max(tuple(blamed) or degrees, key=degrees.__getitem__)
    room, rest = divmod(world, product // degrees[degree_name])
    if complete:
        return degree_name, () if rest else (room,)
    return degree_name, nearest_divisors(world if rest else room, degrees[degree_name])


MIN_TOKENS_PER_CONTEXT_RANK = 8192
"""Tokens of a row that a rank keeps: as many as Llama 3's did, 131,072 over 16 ranks (arXiv
2407.21783, table 4). Rows of one such piece are short enough for data ranks: a search cuts none
further, a pin may."""


def context_degrees(sequence_length: int, scale_up_gpus: int) -> tuple[int, ...]:
    """A group stands inside a node or an NVLink domain, whose links its all-to-alls want."""
    found = (
        s
        for s in divisors(scale_up_gpus)
        if sequence_length % s == 0 and sequence_length // s >= MIN_TOKENS_PER_CONTEXT_RANK
    )
    return tuple(found) or (1,)
