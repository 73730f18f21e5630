"""Defines the result of one check of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, found

MIN_BANDWIDTH_FRACTION = 0.7
"""Bounds measured over assumed bandwidth: below it the plan's step time does not hold. A good
fabric gives 0.8 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """Holds one line of the table. problems: () where the check passes. checked: False where the
    check cannot run; `told` says why."""

    name: str
    told: str
    problems: tuple[Diagnostic, ...] = ()
    checked: bool = True


def gbits(bytes_per_second: float) -> str:
    """Return a rate in Gbit/s."""
    return f"{bytes_per_second * 8 / 1e9:.3g}"


def red(code: str, message: str, help_text: str) -> Diagnostic:
    return found(code, None, message, help_text)


def skipped_check(name: str, told: str) -> HostCheck:
    return HostCheck(name=name, told=told, checked=False)
