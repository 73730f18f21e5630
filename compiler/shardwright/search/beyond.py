"""Legal layouts that have no room: the one that misses by least, and the fastest that more memory would hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.cost.estimate import does_not_fit, price
from shardwright.cost.layout import Layout
from shardwright.diagnostics import Diagnostic
from shardwright.layout.estimate import Estimate, Memory
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy
from shardwright.search.bound import Bound
from shardwright.search.choice import outweighed
from shardwright.search.settle import settle

MORE_MEMORY = 2.0  # the next GPU: 40 GB -> 80 GB, 80 GB -> 141 GB


@dataclass(slots=True, kw_only=True)
class _NoRoom:
    """layout, memory: None until it is settled."""

    strategy: Strategy
    warnings: tuple[Diagnostic, ...]
    layout: Layout | None
    memory: Memory | None

    def settled(self, problem: Problem) -> tuple[Layout, Memory]:
        if self.layout is None or self.memory is None:
            self.layout, self.memory = settle(problem, self.strategy)
        return self.layout, self.memory


class Beyond:
    """Per group that differs in the micro-batch, the smallest that does not fit."""

    def __init__(self, problem: Problem, bound: Bound | None) -> None:
        self._problem, self._bound = problem, bound
        self._found: list[_NoRoom] = []
        self._reason: Diagnostic | None = None
        self._fastest: dict[float, Estimate | None] = {}

    def add(
        self, strategy: Strategy, warnings: tuple[Diagnostic, ...], layout: Layout | None, memory: Memory | None
    ) -> Diagnostic:
        """Why it does not fit, in the figures of the first one. layout, memory: None where it is not settled."""
        added = _NoRoom(strategy=strategy, warnings=warnings, layout=layout, memory=memory)
        self._found.append(added)
        if self._reason is None:
            self._reason = does_not_fit(added.settled(self._problem)[1], strategy)
        return self._reason

    def closest(self) -> Estimate | None:
        settled = [(*each.settled(self._problem), each.warnings) for each in self._found]
        return price(*min(settled, key=lambda each: each[1].peak_bytes)) if settled else None

    def fastest(self, times: float = MORE_MEMORY) -> Estimate | None:
        """Of those that so many times the memory would hold, each moving part at its price."""
        if times not in self._fastest:
            self._fastest[times] = self._find_fastest(times)
        return self._fastest[times]

    def _find_fastest(self, times: float) -> Estimate | None:
        best: tuple[float, Estimate | None] = math.inf, None
        room = times * self._problem.cluster.capacity_bytes
        near = [(self._least(each), place) for place, each in enumerate(self._found) if self._may_fit(each, room)]
        for least, place in sorted(near):
            if least >= best[0]:
                break
            layout, memory = self._found[place].settled(self._problem)
            if memory.peak_bytes <= room:
                priced = price(layout, memory, self._found[place].warnings)
                best = min(best, (outweighed(layout.strategy, priced.time.step_seconds), priced), key=lambda b: b[0])
        return best[1]

    def _may_fit(self, each: _NoRoom, room: float) -> bool:
        return self._bound is None or self._bound.least_bytes(each.strategy) <= room

    def _least(self, each: _NoRoom) -> float:
        return 0.0 if self._bound is None else outweighed(each.strategy, self._bound.least_seconds(each.strategy))
