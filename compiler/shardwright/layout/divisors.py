"""Divisors: what degrees, micro-batches and batches can be."""

from __future__ import annotations


def divisors(n: int) -> tuple[int, ...]:
    """All of them, ascending, in sqrt(n) steps: n may be the GPUs of a whole data centre."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return tuple(dict.fromkeys([*small, *(n // k for k in reversed(small))]))


def nearest_divisors(n: int, wanted: int, count: int = 3) -> tuple[int, ...]:
    """The `count` divisors of n nearest to `wanted`, ascending."""
    return tuple(sorted(sorted(divisors(n), key=lambda d: (abs(d - wanted), d))[:count]))


def nearest_multiples(n: int, wanted: int) -> tuple[int, ...]:
    """The multiples of n on both sides of `wanted`, above 0; `wanted` alone where it is one."""
    return tuple(m for m in dict.fromkeys((wanted // n * n, -(-wanted // n) * n)) if m > 0)
