"""The legal layouts, generated lazily: a rule is asked as soon as the keys that it reads are settled, and what it
forbids is counted, not enumerated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.diagnostics import Diagnostic
from shardwright.layout.axes import AXES, Value
from shardwright.layout.problem import Problem
from shardwright.layout.rule import Candidate, Rule
from shardwright.layout.strategy import Strategy
from shardwright.rules.registry import in_order, rules_for
from shardwright.search.space import Placement, placements, strategy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRegion:
    """Layouts that one rule (or the memory) forbids. reason: that rule's message for the first of them."""

    code: str
    reason: str
    count: int
    example: Strategy


@dataclass(slots=True)
class Rejections:
    """One region a code."""

    regions: dict[str, RejectedRegion] = field(default_factory=dict)

    def add(self, found: Diagnostic, example: Strategy, count: int = 1) -> None:
        known = self.regions.get(found.code)
        self.regions[found.code] = RejectedRegion(
            code=found.code,
            reason=known.reason if known else found.message,
            count=known.count + count if known else count,
            example=known.example if known else example,
        )

    def largest_first(self) -> tuple[RejectedRegion, ...]:
        return tuple(sorted(self.regions.values(), key=lambda r: (-r.count, r.code)))


Legal = tuple[Strategy, tuple[Diagnostic, ...]]
"""A layout that breaks no rule, and the warnings about it."""


def legal_layouts(problem: Problem, rejections: Rejections) -> Iterator[tuple[Legal, ...]]:
    """Groups that differ in the micro-batch alone, smallest first. What a rule forbids goes to `rejections`."""
    for placement in placements(problem):
        yield from _Walk(problem, placement, rejections).groups()


class _Walk:
    """One placement: its axes settled one after the other."""

    def __init__(self, problem: Problem, placement: Placement, rejections: Rejections) -> None:
        self.problem, self.placement, self.rejections = problem, placement, rejections
        self.levels = _levels(problem.recipe.target, [name for name, _ in placement.axes])

    def groups(self) -> Iterator[tuple[Legal, ...]]:
        warnings = self._check(0, {})
        if warnings is not None:
            yield from self._descend(1, {}, warnings)

    def _descend(
        self, level: int, settled: dict[str, Value], warnings: tuple[Diagnostic, ...]
    ) -> Iterator[tuple[Legal, ...]]:
        name, choices = self.placement.axes[level - 1]
        last = level == len(self.placement.axes)
        group: list[Legal] = []
        for value in choices:
            below = {**settled, name: value}
            found = self._check(level, below)
            if found is None:
                continue
            if last:
                group.append((strategy_of(self.problem.recipe, self.placement, below), in_order((*warnings, *found))))
            else:
                yield from self._descend(level + 1, below, (*warnings, *found))
        if group:
            yield tuple(group)

    def _check(self, level: int, settled: dict[str, Value]) -> tuple[Diagnostic, ...] | None:
        """The warnings of this level's rules; None where one is broken, which rules out all below."""
        rules = self.levels[level]
        if not rules:
            return ()
        strategy = strategy_of(self.problem.recipe, self.placement, settled)
        p = self.problem
        candidate = Candidate(recipe=p.recipe, graph=p.graph, cluster=p.cluster, strategy=strategy)
        found = in_order(rule.check(candidate) for rule in rules)
        if found and found[0].severity == "error":
            self.rejections.add(found[0], strategy, math.prod(len(c) for _, c in self.placement.axes[level:]))
            return None
        return found


def _levels(target: str, names: list[str]) -> tuple[tuple[Rule, ...], ...]:
    """Per level (the degrees, then each axis) the rules that can be asked there and not before."""
    settled = {axis.name for axis in AXES if axis.section} - set(names)
    waiting = list(rules_for(target).values())
    levels: list[tuple[Rule, ...]] = []
    for name in (None, *names):
        if name is not None:
            settled |= {name, "gradient_accumulation_steps"} if name == "micro_batch_size" else {name}
        levels.append(tuple(rule for rule in waiting if rule.reads <= settled))
        waiting = [rule for rule in waiting if not rule.reads <= settled]
    assert not waiting, "a rule reads a key that no axis settles"
    return tuple(levels)
