"""The legal layouts, generated lazily: a rule is asked as soon as the keys that it reads are
settled, and what it forbids is counted, not enumerated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.diagnostics import Diagnostic
from shardwright.layout.axes import AXES, Value
from shardwright.layout.layout import Layout
from shardwright.layout.layout_rule import Candidate, Rule
from shardwright.layout.planning_problem import Problem
from shardwright.search.candidate_layouts import LayoutGrid, layout_at, layout_grids
from shardwright.search.rule_registry import rules_for, sort_diagnostics


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRegion:
    """Layouts that one rule (or the memory) forbids. reason: that rule's message for the first of
    them."""

    code: str
    reason: str
    count: int
    example: Layout


@dataclass(slots=True)
class Rejections:
    """One region a code. first: its reason and its example."""

    first: dict[str, tuple[str, Layout]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, found: Diagnostic, example: Layout, count: int = 1) -> None:
        self.first.setdefault(found.code, (found.message, example))
        self.counts[found.code] += count

    def largest_first(self) -> tuple[RejectedRegion, ...]:
        regions = (
            RejectedRegion(code=code, reason=reason, count=self.counts[code], example=example)
            for code, (reason, example) in self.first.items()
        )
        return tuple(sorted(regions, key=lambda r: (-r.count, r.code)))


STEPS = "gradient_accumulation_steps"
"""They follow from the batch, the micro-batch and the data ranks."""

Legal = tuple[Layout, tuple[Diagnostic, ...]]
"""A layout that breaks no rule, and the warnings about it."""


def legal_layouts(problem: Problem, rejections: Rejections) -> Iterator[tuple[Legal, ...]]:
    """Groups that differ in the micro-batch alone, smallest first. What a rule forbids goes to
    `rejections`."""
    known: dict[tuple[str, ...], tuple[_Level, ...]] = {}
    for placement in layout_grids(problem):
        names = tuple(name for name, _ in placement.axes)
        if names not in known:
            known[names] = _levels(problem.recipe.target, names)
        yield from _Walk(problem, placement, rejections, known[names]).groups()


@dataclass(slots=True, kw_only=True)
class _Level:
    """Rules that can be asked once an axis is settled, and not before. reads: the keys that decide
    whether one of them is broken. told: by the values of these, the rule that is broken, or None
    where nothing is to be said."""

    rules: tuple[Rule, ...]
    reads: tuple[str, ...]
    told: dict[tuple[Value, ...], Diagnostic | None] = field(default_factory=dict)


class _Walk:
    """One placement: its axes settled one after the other."""

    def __init__(
        self,
        problem: Problem,
        placement: LayoutGrid,
        rejections: Rejections,
        levels: tuple[_Level, ...],
    ) -> None:
        self.problem, self.placement, self.rejections, self.levels = (
            problem,
            placement,
            rejections,
            levels,
        )

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
                group.append(
                    (
                        layout_at(self.problem.recipe, self.placement, below),
                        sort_diagnostics((*warnings, *found)),
                    )
                )
            else:
                yield from self._descend(level + 1, below, (*warnings, *found))
        if group:
            yield tuple(group)

    def _check(self, level: int, settled: dict[str, Value]) -> tuple[Diagnostic, ...] | None:
        """The warnings of this level's rules; None where one is broken, which rules out all
        below."""
        asked = self.levels[level]
        fixed = self.placement.settled
        values = tuple([settled[name] if name in settled else fixed[name] for name in asked.reads])
        below = math.prod(len(c) for _, c in self.placement.axes[level:])
        if values in asked.told:
            broken = asked.told[values]
            if broken is not None:
                self.rejections.counts[broken.code] += below
            return () if broken is None else None
        strategy = layout_at(self.problem.recipe, self.placement, settled)
        p = self.problem
        candidate = Candidate(recipe=p.recipe, graph=p.graph, cluster=p.cluster, strategy=strategy)
        found = sort_diagnostics(rule.check(candidate) for rule in asked.rules)
        is_broken = bool(found) and found[0].severity == "error"
        if is_broken or not found:  # warnings are in the words of each layout
            asked.told[values] = found[0] if found else None
        if is_broken:
            self.rejections.add(found[0], strategy, below)
            return None
        return found


def _levels(target: str, names: tuple[str, ...]) -> tuple[_Level, ...]:
    """Of the degrees, then of each axis."""
    settled = {axis.name for axis in AXES if axis.section} - set(names)
    waiting = list(rules_for(target).values())
    levels: list[_Level] = []
    for name in (None, *names):
        if name is not None:
            settled |= {name, STEPS} if name == "micro_batch_size" else {name}
        rules = tuple(rule for rule in waiting if rule.reads <= settled)
        reads = set().union(*(rule.reads for rule in rules))
        reads |= {"micro_batch_size", "data"} if STEPS in reads else set()
        levels.append(_Level(rules=rules, reads=tuple(sorted(reads - {STEPS}))))
        waiting = [rule for rule in waiting if not rule.reads <= settled]
    assert not waiting, "a rule reads a key that no axis settles"
    return tuple(levels)
