"""A rule about layouts: what it looks at, what it says, and what of the layout it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Problem):
    """What a rule looks at: a strategy for a problem."""

    strategy: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """reads: the strategy's keys that decide whether the layout breaks it (its message may name
    others). A search that has settled these rules out everything below at once."""

    check: Callable[[Candidate], Diagnostic | None]
    reads: frozenset[str]


def rule(check: Callable[[Candidate], Diagnostic | None], *reads: str) -> Rule:
    return Rule(check=check, reads=frozenset(reads))
