"""What was compared, how far it was off, and the limits (the same as of the project's own
proofs)."""

from __future__ import annotations

from dataclasses import dataclass

LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE, RATE_ABSOLUTE = 1e-5, 1e-4, 2e-5, 1e-12


@dataclass(frozen=True, slots=True)
class Comparison:
    """worst: the largest difference (utils/numeric_difference.py: infinite, never NaN), in the unit
    that `what` names; it passes up to limit."""

    name: str
    what: str
    worst: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.worst <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """model: the tiny one. layout, verified: recipe key names, of the recipe's own and of the tiny
    layout."""

    architecture: str
    parameters: int
    layout: str
    verified: str
    checks: tuple[Comparison, ...]
    seconds: float

    @property
    def matches(self) -> bool:
        return all(check.passed for check in self.checks)
