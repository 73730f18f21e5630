"""Figures as people read them: one place for the forms that commands, pages and logs share."""

from __future__ import annotations

MINUTES_PER_DAY, SECONDS_PER_DAY = 1440, 86_400
GIB = 2**30


def format_number(value: float, digits: int = 3) -> str:
    """So many digits, thousands apart; never an exponent for large ones: 433,333 and 0.0312."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def rank_or_gpu(*, is_cpu: bool) -> str:
    """Return what a rank runs on. On a CPU there is no smaller unit than the rank itself."""
    return "rank" if is_cpu else "GPU"


def format_device_hours(hours: float, *, is_cpu: bool) -> str:
    return f"{format_number(hours, 4)} {rank_or_gpu(is_cpu=is_cpu)} hours"


def format_token_rate(tokens_per_second: float, *, is_cpu: bool) -> str:
    return f"{tokens_per_second:,.0f} tokens/s per {rank_or_gpu(is_cpu=is_cpu)}"


def format_days(days: float) -> str:
    """Format days in the largest unit of which there are two."""
    for unit, per_day in (("days", 1), ("hours", 24), ("minutes", MINUTES_PER_DAY)):
        if days * per_day >= 2:
            return f"{format_number(days * per_day)} {unit}"
    return f"{format_number(days * SECONDS_PER_DAY)} seconds"


def format_bytes(size: int) -> str:
    """Decimal units, as disks are sold."""
    if size < 1000:
        return f"{size} byte{'' if size == 1 else 's'}"
    power = 1 if size < 999_500 else 2 if size < 999_500_000 else 3
    return f"{format_number(size / 1000**power)} {('kB', 'MB', 'GB')[power - 1]}"
