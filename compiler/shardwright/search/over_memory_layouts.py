"""Keep legal layouts that do not fit: the one that misses by least, and the fastest that more
memory would hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.layout_costs import over_memory_error, price
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_resolution import resolve_layout
from shardwright.search.ranking_penalties import with_complexity_penalty
from shardwright.search.step_time_bound import StepTimeBound

NEXT_GPU_MEMORY_FACTOR = 2.0  # the next GPU: 40 GB -> 80 GB, 80 GB -> 141 GB
MEMORY_BOUND_FROM = 0.05
"""A layout beyond memory that is faster by less, within what predictions are off by, binds
nothing."""


@dataclass(slots=True, kw_only=True)
class _OverMemoryLayout:
    """Holds a layout that does not fit. layout, memory: None until resolved."""

    strategy: Layout
    warnings: tuple[Diagnostic, ...]
    layout: PricedLayout | None
    memory: Memory | None

    def resolved(self, problem: Problem) -> tuple[PricedLayout, Memory]:
        if self.layout is None or self.memory is None:
            self.layout, self.memory = resolve_layout(problem, self.strategy)
        return self.layout, self.memory


class OverMemoryLayouts:
    """Collects, of each group that differs in the micro-batch size alone, the smallest that does
    not fit."""

    def __init__(self, problem: Problem, bound: StepTimeBound | None) -> None:
        self._problem, self._bound = problem, bound
        self._found: list[_OverMemoryLayout] = []
        self._reason: Diagnostic | None = None
        self._fastest: dict[tuple[float, float], Estimate | None] = {}

    def add(
        self,
        strategy: Layout,
        warnings: tuple[Diagnostic, ...],
        layout: PricedLayout | None,
        memory: Memory | None,
    ) -> Diagnostic:
        """Add a layout and return SW3201 with the figures of the first one added. layout,
        memory: None where it is not resolved yet."""
        added = _OverMemoryLayout(
            strategy=strategy, warnings=warnings, layout=layout, memory=memory
        )
        self._found.append(added)
        if self._reason is None:
            self._reason = over_memory_error(added.resolved(self._problem)[1], strategy)
        return self._reason

    def closest(self) -> Estimate | None:
        resolved = [(*each.resolved(self._problem), each.warnings) for each in self._found]
        return price(*min(resolved, key=lambda each: each[1].peak_bytes)) if resolved else None

    def fastest(self, times: float, below: float) -> Estimate | None:
        """Return the best layout, complexity penalties included, that fits in `times` the memory
        and whose step takes less than `below` seconds."""
        asked = times, below
        if asked not in self._fastest:
            self._fastest[asked] = self._find_fastest(*asked)
        return self._fastest[asked]

    def _find_fastest(self, times: float, below: float) -> Estimate | None:
        best: tuple[float, Estimate | None] = math.inf, None
        room = times * self._problem.cluster.capacity_bytes
        for least, place in sorted(self._near(room, below)):
            found = self._found[place]
            if least >= best[0]:
                break
            if self._bound is not None:
                least = self._bound.least_seconds_in(found.strategy, room)
                if least >= below or with_complexity_penalty(found.strategy, least) >= best[0]:
                    continue
            layout, memory = found.resolved(self._problem)
            if memory.peak_bytes > room:
                continue
            priced = price(layout, memory, found.warnings)
            weighed = with_complexity_penalty(layout.strategy, priced.time.step_seconds)
            if priced.time.step_seconds < below and weighed < best[0]:
                best = weighed, priced
        return best[1]

    def _near(self, room: float, below: float) -> Iterator[tuple[float, int]]:
        """Yield the least seconds of each layout that may fit, complexity penalties included,
        and its index."""
        for place, each in enumerate(self._found):
            if self._bound is None:
                yield 0.0, place
            elif self._bound.least_bytes(each.strategy) <= room:
                least = self._bound.least_seconds(each.strategy)
                if least < below:
                    yield with_complexity_penalty(each.strategy, least), place
