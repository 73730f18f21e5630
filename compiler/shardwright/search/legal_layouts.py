"""Generate the legal layouts lazily: a rule is checked as soon as the keys that it reads are
set, and what it forbids is counted, not enumerated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.diagnostics import Diagnostic
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import (
    AXES,
    Value,
    as_int,
    choices,
    rank_axes,
    world_factorizations,
    world_size_of,
)
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Candidate, Layout, Rule, auto_by_default_axes
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.rule_registry import rules_for, sort_diagnostics

# The layouts to try: every choice of the axes' values (layout/axes.py) that fills the cluster,
# pins respected.


_make: Callable[..., Layout] = Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGrid:
    """Holds one choice of degrees. fixed: the degrees, which fill the cluster, and keys with one
    value there. axes: the values of the other keys, in the order in which a search sets them.
    The last is micro_batch_size, smallest first, so that memory only grows along it."""

    fixed: Mapping[str, Value]
    axes: tuple[tuple[str, tuple[Value, ...]], ...]


def layout_grids(problem: Problem) -> Iterator[LayoutGrid]:
    """Yield every choice of degrees whose product is the world size and whose data degree
    divides the batch; nothing where the pins do not multiply out."""
    own = ENGINES[problem.recipe.target].axes
    for degrees in world_factorizations(problem):
        fixed: dict[str, Value] = {**degrees}
        walked: list[tuple[str, tuple[Value, ...]]] = []
        for axis in AXES:
            if axis.section and not axis.ranks:
                values = choices(axis, problem, degrees)
                if (
                    not axis.in_every_engine
                    and axis.name not in own
                    and axis.pin(problem.recipe) is None
                ):
                    fixed[axis.name] = axis.off_value
                elif axis.values is not None:
                    walked.append((axis.name, values))
                else:
                    fixed[axis.name] = values[0]
        if all(values for _, values in walked):
            yield LayoutGrid(fixed=fixed, axes=tuple(walked))


def candidate_layouts(problem: Problem) -> Iterator[Layout]:
    """Yield every layout of every grid, legal or not."""
    for grid in layout_grids(problem):
        yield from layouts_of(problem.recipe, grid, {name for name, _ in grid.axes})


def layouts_of(recipe: Recipe, grid: LayoutGrid, axes: Container[str]) -> Iterator[Layout]:
    """Yield a layout for each choice along these axes of a grid; the other keys have their first
    value."""
    first, chosen = _first_values(grid), [each for each in grid.axes if each[0] in axes]
    names = [name for name, _ in chosen]
    for values in itertools.product(*(tried for _, tried in chosen)):
        yield _strategy(recipe, {**first, **dict(zip(names, values, strict=True))})


def split_grid(grid: LayoutGrid, axes: Container[str]) -> Iterator[LayoutGrid]:
    """Split a grid into those with one value along each of these axes."""
    choices = (
        [(name, (value,)) for value in values] if name in axes else [(name, values)]
        for name, values in grid.axes
    )
    for chosen in itertools.product(*choices):
        yield LayoutGrid(fixed=grid.fixed, axes=chosen)


def _first_values(grid: LayoutGrid) -> dict[str, Value]:
    return {**grid.fixed, **{name: values[0] for name, values in grid.axes}}


def pinned_layout(recipe: Recipe, cluster: Cluster) -> Layout:
    """Return the pinned layout with off values for the rest, whether or not it multiplies out;
    the rules explain what is wrong with it."""
    pins = {axis.name: axis.pin(recipe) for axis in AXES if axis.section}
    values = {
        axis.name: axis.off_value if (pin := pins.get(axis.name)) is None else pin
        for axis in AXES
        if axis.section
    }

    def room(name: str) -> int:
        """Return what the other degrees leave of the world size to this one; 0 where they do not
        divide it."""
        others = world_size_of(
            {axis.name: as_int(values[axis.name]) for axis in rank_axes()}
        ) // as_int(values[name])
        return 0 if cluster.world_size % others else cluster.world_size // others

    *others, last = (axis.name for axis in rank_axes())
    if pins[last] is None:
        values[last] = max(
            1,
            cluster.world_size
            // world_size_of({name: as_int(values[name]) for name in (*others, last)}),
        )
    free = next((name for name in others if pins[name] is None and room(name)), None)
    if free is not None:
        values[free] = room(free)
    return _strategy(recipe, values)


def without_layout_pins(recipe: Recipe) -> Recipe:
    """Drop the recipe's pins. `offload` stays: a search that was not asked for it does not move
    states to the host."""
    free: dict[str, Any] = {axis.name: None for axis in auto_by_default_axes()}
    pins = dataclasses.replace(recipe.parallelism, **free)
    return dataclasses.replace(recipe, parallelism=pins)


def zero_baseline(recipe: Recipe, *, zero_stage: int) -> Recipe:
    """Return the recipe of the baseline: data parallelism with this ZeRO stage alone."""
    free = without_layout_pins(recipe)
    left = [
        axis
        for axis in AXES
        if axis.is_auto_by_default
        or (axis.off_when_world_pinned and axis.section and axis.pin(recipe) is None)
    ]
    plain: dict[str, Any] = {axis.name: axis.off_value for axis in left if axis.feature}
    pins = dataclasses.replace(free.parallelism, **plain, zero_stage=zero_stage)
    return dataclasses.replace(free, parallelism=pins)


def _strategy(recipe: Recipe, values: Mapping[str, Value]) -> Layout:
    """Build a layout from the values of all keys of the recipe. `loss: auto` is resolved in
    layout_resolution."""
    at_once = as_int(values["micro_batch_size"]) * as_int(values["data"])
    return _make(
        **values, gradient_accumulation_steps=max(1, recipe.training.global_batch_size // at_once)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRegion:
    """Holds the layouts that one rule, or the memory, forbids. reason: the message for the first
    of them."""

    code: str
    reason: str
    count: int
    example: Layout


@dataclass(slots=True)
class Rejections:
    """Collects one region for each rule's code. first: its reason and its example."""

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


ACCUMULATION_STEPS = "gradient_accumulation_steps"
"""They follow from the batch, the micro-batch and the data ranks."""

Legal = tuple[Layout, tuple[Diagnostic, ...]]
"""A layout that breaks no rule, and the warnings about it."""


def legal_layouts(problem: Problem, rejections: Rejections) -> Iterator[tuple[Legal, ...]]:
    """Yield groups of layouts that differ in the micro-batch size alone, smallest first. What a
    rule forbids is added to `rejections`."""
    rules = RulesByLevel(problem.recipe.target)
    for grid in layout_grids(problem):
        yield from legal_layouts_of(problem, grid, rejections, rules)


def legal_layouts_of(
    problem: Problem, grid: LayoutGrid, rejections: Rejections, rules: RulesByLevel
) -> Iterator[tuple[Legal, ...]]:
    """Yield the groups of one grid, as legal_layouts does."""
    return _Walk(problem, grid, rejections, rules.along(grid)).groups()


@dataclass(slots=True, kw_only=True)
class _Level:
    """Holds rules that can be checked once an axis is set, and not before. reads: the keys that
    decide them. results: by the values of those, the broken rule, or None where all pass without
    a warning."""

    rules: tuple[Rule, ...]
    reads: tuple[str, ...]
    results: dict[tuple[Value, ...], Diagnostic | None] = field(default_factory=dict)


class _Walk:
    """Walks through one grid, fixing one axis after the other. values: of all keys; those that are
    not set yet have their first value."""

    def __init__(
        self,
        problem: Problem,
        grid: LayoutGrid,
        rejections: Rejections,
        levels: tuple[_Level, ...],
    ) -> None:
        self.problem, self.grid, self.rejections, self.levels = (
            problem,
            grid,
            rejections,
            levels,
        )

    def groups(self) -> Iterator[tuple[Legal, ...]]:
        values = _first_values(self.grid)
        warnings = self._check(0, values)
        if warnings is not None:
            yield from self._descend(1, values, warnings)

    def _descend(
        self, level: int, values: dict[str, Value], warnings: tuple[Diagnostic, ...]
    ) -> Iterator[tuple[Legal, ...]]:
        name, choices = self.grid.axes[level - 1]
        last = level == len(self.grid.axes)
        group: list[Legal] = []
        for value in choices:
            below = {**values, name: value}
            found = self._check(level, below)
            if found is None:
                continue
            if last:
                group.append(
                    (
                        _strategy(self.problem.recipe, below),
                        sort_diagnostics((*warnings, *found)),
                    )
                )
            else:
                yield from self._descend(level + 1, below, (*warnings, *found))
        if group:
            yield tuple(group)

    def _check(self, level: int, values: dict[str, Value]) -> tuple[Diagnostic, ...] | None:
        """Return the warnings of this level's rules; None where one is broken, which rejects all
        below."""
        here = self.levels[level]
        read = tuple([values[name] for name in here.reads])
        if read in here.results:
            broken = here.results[read]
            if broken is None:
                return ()
            self.rejections.counts[broken.code] += self._below(level)
            return None
        p, strategy = self.problem, _strategy(self.problem.recipe, values)
        candidate = Candidate(recipe=p.recipe, graph=p.graph, cluster=p.cluster, strategy=strategy)
        found = sort_diagnostics(rule.check(candidate) for rule in here.rules)
        is_broken = bool(found) and found[0].severity == "error"
        if is_broken or not found:  # warnings are in the words of each layout
            here.results[read] = found[0] if found else None
        if is_broken:
            self.rejections.add(found[0], strategy, self._below(level))
            return None
        return found

    def _below(self, level: int) -> int:
        """Count the layouts of which the first `level` axes are set."""
        return math.prod(len(tried) for _, tried in self.grid.axes[level:])


class RulesByLevel:
    """Holds an engine's rules by the axis from which on they can be checked, and what they said."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._levels: dict[tuple[str, ...], tuple[_Level, ...]] = {}

    def along(self, grid: LayoutGrid) -> tuple[_Level, ...]:
        names = tuple(name for name, _ in grid.axes)
        if names not in self._levels:
            self._levels[names] = _levels(self._target, names)
        return self._levels[names]


def _levels(target: str, names: tuple[str, ...]) -> tuple[_Level, ...]:
    """Build the levels: the degrees', then each axis's."""
    chosen = {axis.name for axis in AXES if axis.section} - set(names)
    waiting = list(rules_for(target).values())
    levels: list[_Level] = []
    for name in (None, *names):
        if name is not None:
            chosen |= {name, ACCUMULATION_STEPS} if name == "micro_batch_size" else {name}
        rules = tuple(rule for rule in waiting if rule.reads <= chosen)
        reads = set().union(*(rule.reads for rule in rules))
        reads |= {"micro_batch_size", "data"} if ACCUMULATION_STEPS in reads else set()
        levels.append(_Level(rules=rules, reads=tuple(sorted(reads - {ACCUMULATION_STEPS}))))
        waiting = [rule for rule in waiting if not rule.reads <= chosen]
    assert not waiting, "a rule reads a key that no axis settles"
    return tuple(levels)
