"""Where to cut a row of blocks into pipeline stages, so that the simulated step is the shortest.

The slowest stage alone does not decide: of the cuts that tie on it, those with the heavy stages in
front are faster, for a rank that waits for its first gradient has forward passes to run, and the
first rank has the most of them. Where there are few cuts, all are candidates; else a descent moves
one block from one stage to another at a time. Cuts whose lower bound is not below the best step so
far are never simulated.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.layout.pipeline_step_time import steps_seconds
from shardwright.layout.vectorized_pipeline_simulation import Floats
from shardwright.recipe.literal_types import Schedule

Cuts = NDArray[np.int64]
"""(cuts, stages + 1): boundaries, counted in blocks."""

TRY_ALL = 400
ALL_PAIRS = 16
TILTS = (0.0, 0.1, 0.3)
# Arrays of this many cuts times stages squared (the closed form) or times stages (levels) take
# hardly longer than one.
AT_ONCE = 4000
AT_ONCE_LEVELS = 1000
# Up to so many stages: descents, each from another start, and arrays in each. A search asks for
# hundreds of partitions, and many stages leave little to gain beyond the starts.
EFFORT = ((6, 3, 8), (8, 2, 6), (16, 2, 4), (32, 1, 2), (math.inf, 1, 1))
EFFORT_WITHOUT_CLOSED_FORM = ((6, 3, 8), (16, 1, 2), (math.inf, 1, 1))
# Steps closer than this share are equal: what floating-point noise decides would not be a choice.
EQUAL = 1e-9
# A descent goes on for this share of the step.
WORTH = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Blocks in order, and the schedule that runs them. Seconds are of one micro-batch.

    forward_seconds, backward_seconds: prefix sums over the blocks (length blocks + 1);
    per_stage_seconds: what a stage takes beyond its blocks, forward and backward; send_seconds: one
    message. after_seconds: prefix sums too, of what a rank does once, when all micro-batches are
    through; the ranks do it at the same time. least_slowest: a cut whose slowest rank takes as
    little as it can, the first start of the descent.
    """

    schedule: Schedule
    micro_batches: int
    stages: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    per_stage_seconds: tuple[float, float]
    send_seconds: float
    after_seconds: tuple[float, ...]
    least_slowest: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.forward_seconds) - 1


@functools.lru_cache(maxsize=8192)
def fastest_cut(row: Row) -> tuple[int, ...]:
    """Boundaries of non-empty stages, counted in blocks; there are at least as many blocks as
    stages."""
    found = fastest_cut_that(row, lambda cut: True)
    assert found is not None, "every cut is allowed"
    return found


def fastest_cut_that(
    row: Row, allows: Callable[[tuple[int, ...]], bool], start: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """The fastest of the cuts that `allows` (memory, say). start: one of them, where one is known.
    None: none found."""
    best = _Descent(row, allows, 0)
    if math.comb(row.blocks - 1, row.stages - 1) <= TRY_ALL:
        best.better(_all_cuts(row.blocks, row.stages), math.inf)
        return best.best
    known = [] if start is None else [start]
    starts = np.array(list(dict.fromkeys([*known, *_starts(row)])))
    steps = step_seconds(row, starts)
    tried, (descents, arrays) = 0, _effort(row)
    for index in np.argsort(np.round(steps / steps.max(), 9), kind="stable"):
        cut = _plain(starts[index])
        if tried == descents or not allows(cut):
            continue
        tried += 1
        descent = _Descent(row, allows, arrays, cut, float(steps[index]))
        while descent.better(_neighbours(cut), descent.step_seconds * (1 - WORTH), first=True):
            cut = descent.best or cut
        if descent.step_seconds < best.step_seconds * (1 - EQUAL):
            best = descent
    return best.best


def _effort(row: Row) -> tuple[int, int]:
    has_form = row.schedule == "1f1b" and row.micro_batches >= row.stages
    table = EFFORT if has_form else EFFORT_WITHOUT_CLOSED_FORM
    return next((descents, arrays) for most, descents, arrays in table if row.stages <= most)


class _Descent:
    """The best cut so far, and how many more arrays may be simulated."""

    def __init__(
        self,
        row: Row,
        allows: Callable[[tuple[int, ...]], bool],
        arrays: int,
        best: tuple[int, ...] | None = None,
        step_seconds: float = math.inf,
    ) -> None:
        self.row, self.allows, self.best, self.step_seconds = row, allows, best, step_seconds
        self._arrays = arrays

    def better(self, cuts: Cuts, limit_seconds: float, *, first: bool = False) -> bool:
        """Whether an allowed one of the cuts takes less than the limit; the fastest of them (first:
        of the first array that has one) is then the best. Of equal ones, the first."""
        bounds = _lower_bounds(self.row, cuts)
        order = np.argsort(np.round(bounds / bounds.max(initial=1e-300), 9), kind="stable")
        size = max(4, AT_ONCE // self.row.stages**2)
        if self.row.schedule == "dualpipev" or self.row.micro_batches < self.row.stages:
            size = max(16, AT_ONCE_LEVELS // self.row.stages)
        found = False
        for at in range(0, len(cuts), size):
            chosen = order[at : at + size]
            chosen = chosen[bounds[chosen] < limit_seconds * (1 - EQUAL)]
            if not len(chosen) or (found and first) or (first and not self._arrays):
                break
            self._arrays -= first
            steps = step_seconds(self.row, cuts[chosen])
            for index in np.argsort(np.round(steps / steps.max(), 9), kind="stable"):
                if steps[index] >= limit_seconds * (1 - EQUAL):
                    break
                cut = _plain(cuts[chosen[index]])
                if self.allows(cut):
                    self.best, self.step_seconds, limit_seconds, found = (
                        cut,
                        steps[index],
                        steps[index],
                        True,
                    )
                    break
        return found


def step_seconds(row: Row, cuts: Cuts) -> Floats:
    """Simulated, one a cut."""
    forward, backward = _stage_seconds(row, cuts)
    schedule = steps_seconds(row.schedule, row.micro_batches, forward, backward, row.send_seconds)
    return schedule + _after_seconds(row, cuts)


def _after_seconds(row: Row, cuts: Cuts) -> Floats:
    after = _over(row.after_seconds, cuts)
    if row.schedule == "dualpipev":
        after = after[:, : row.stages // 2] + after[:, : row.stages // 2 - 1 : -1]
    longest: Floats = after.max(axis=1)
    return longest


def _starts(row: Row) -> list[tuple[int, ...]]:
    """The least slowest, DeepSpeed's `uniform`, and cuts that are even in one respect, with more or
    less more in front: each boundary where the running sum comes nearest to its share."""
    seconds = np.add(row.forward_seconds, row.backward_seconds)
    stages = np.arange(1, row.stages)
    share = stages / row.stages
    each, left = divmod(row.blocks, row.stages)
    cuts = [row.least_slowest, tuple(each * s + min(s, left) for s in range(row.stages + 1))]
    blocks = np.arange(row.blocks + 1)
    between = np.clip(blocks - 1, 0, row.blocks - 2)
    # In seconds, in blocks, in decoder layers alone, and as if the first block were as slow as the
    # last.
    even = (seconds, blocks, between, seconds + np.minimum(blocks, 1) * (seconds[-1] - seconds[-2]))
    wanted = share + np.array(TILTS)[:, None] * share * (1 - share)
    for sums in even:
        nearest = np.searchsorted((sums[:-1] + sums[1:]) / 2, sums[-1] * wanted, side="right")
        spread = np.maximum.accumulate(nearest - stages, axis=1) + stages
        inner = np.clip(spread, stages, row.blocks - row.stages + stages)
        cuts += [(0, *cut, row.blocks) for cut in inner.tolist()]
    return cuts


def _plain(cut: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(cut.tolist())


def _neighbours(cut: tuple[int, ...]) -> Cuts:
    cuts: Cuts = np.array(cut) + _moves(len(cut) - 1)
    return cuts[(cuts[:, 1:] > cuts[:, :-1]).all(axis=1)]


@functools.lru_cache(maxsize=256)
def _all_cuts(blocks: int, stages: int) -> Cuts:
    inner = itertools.combinations(range(1, blocks), stages - 1)
    return np.array([(0, *cut, blocks) for cut in inner])


@functools.lru_cache(maxsize=256)
def _moves(stages: int) -> Cuts:
    """One block from one stage to another; every boundary between them moves along. Where there are
    many stages, only to the neighbours, and to and from the first and the last."""
    moves = []
    for a, b in itertools.combinations(range(stages), 2):
        if stages <= ALL_PAIRS or a == 0 or b == stages - 1 or b - a == 1:
            move = [int(a < i <= b) for i in range(stages + 1)]
            moves += [move, [-x for x in move]]
    return np.array(moves, dtype=np.int64).reshape(-1, stages + 1)


def _stage_seconds(row: Row, cuts: Cuts) -> tuple[Floats, Floats]:
    forward = _over(row.forward_seconds, cuts) + row.per_stage_seconds[0]
    backward = _over(row.backward_seconds, cuts) + row.per_stage_seconds[1]
    return forward, backward


def _over(sums: tuple[float, ...], cuts: Cuts) -> Floats:
    """Each stage's part of the prefix sums; np.diff takes three times as long on arrays this
    small."""
    at = np.array(sums)[cuts]
    result: Floats = at[:, 1:] - at[:, :-1]
    return result


def _lower_bounds(row: Row, cuts: Cuts) -> Floats:
    """No step is shorter. A rank starts behind one forward pass of each before it, ends a backward
    pass of each before its own last, and has m of both in between. Under 1F1B it also waits, once,
    for a micro-batch to come back from the ranks behind it: after its first m' = min(p - rank, m)
    forward passes at the start, before its last m' backward passes at the end."""
    forward, backward = _stage_seconds(row, cuts)
    both, m = forward + backward, row.micro_batches
    if row.schedule == "dualpipev":
        ranks = row.stages // 2
        front = both[:, :ranks]
        loads = front + both[:, : ranks - 1 : -1]
        bounds: Floats = (np.cumsum(front, axis=1) - front + m * loads).max(axis=1)
        return bounds + _after_seconds(row, cuts)
    total = both.sum(axis=1, keepdims=True)
    ahead = np.minimum(row.stages - np.arange(row.stages), m)
    own = np.cumsum(both, axis=1) - both + m * both
    start = total + (m - ahead) * forward + (m - 1) * backward
    end = total + (m - 1) * forward + (m - ahead) * backward
    waiting: Floats = np.maximum(own, np.maximum(start, end)).max(axis=1)
    return waiting + _after_seconds(row, cuts)
