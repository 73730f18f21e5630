"""Assign layers to pipeline stages, for the search, the estimate and the compiled folder.

Takes the assignment with the shortest simulated step of those whose every rank keeps the
prediction's error free; else of those that fit. Where nothing fits, takes the one whose slowest
rank does the least work.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.vision_encoder_flops import vision_encoder_flops
from shardwright.engines.engine_table import traits_of
from shardwright.engines.run_profiles import kernel_profile
from shardwright.layout.layout import Layout
from shardwright.layout.pipeline_step_time import (
    MAX_SIMULATED_DUALPIPEV_RANKS,
    Floats,
    step_seconds_of_partitions,
)
from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.layout.stage_balancing import (
    balanced_boundaries,
    balanced_interleaved_boundaries,
    max_stages,
)
from shardwright.models.model_graph import ModelGraph, boundaries_in_layers
from shardwright.recipe.literal_types import Schedule
from shardwright.recipe.recipe_types import Recipe

# Where to cut a row of blocks into pipeline stages, so that the simulated step is the shortest.
#
# The slowest stage alone does not decide: of the cuts that tie on it, those with the heavy stages
# in
# front are faster, for a rank that waits for its first gradient has forward passes to run, and the
# first rank has the most of them. Where there are few cuts, all are candidates; else a descent
# moves
# one block from one stage to another at a time. Cuts whose lower bound is not below the best step
# so
# far are never simulated.


BoundaryArray = NDArray[np.int64]
"""(cuts, stages + 1): boundaries, counted in blocks."""

MAX_EXHAUSTIVE = 400
ALL_PAIRS = 16
TILTS = (0.0, 0.1, 0.3)
# Arrays of this many cuts times stages squared (the closed form) or times stages (levels) take
# hardly longer than one.
BATCH_SIZE = 4000
BATCH_SIZE_SIMULATED = 1000
# Up to so many stages: descents, each from another start, and arrays in each. A search asks for
# hundreds of partitions, and many stages leave little to gain beyond the starts.
EFFORT = ((6, 3, 8), (8, 2, 6), (16, 2, 4), (32, 1, 2), (math.inf, 1, 1))
EFFORT_WITHOUT_CLOSED_FORM = ((6, 3, 8), (16, 1, 2), (math.inf, 1, 1))
# Steps closer than this share are equal: what floating-point noise decides would not be a choice.
TIE_TOLERANCE = 1e-9
# A descent goes on for this share of the step.
MIN_GAIN = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBlocks:
    """Holds blocks in order, and the schedule that runs them. Seconds are of one micro-batch.

    forward_seconds, backward_seconds: prefix sums over the blocks (length blocks + 1).
    per_stage_seconds: a stage's forward and backward seconds beyond its blocks. send_seconds:
    one message. once_per_step_seconds: prefix sums of what a rank does once, after all
    micro-batches; all ranks do it at the same time. balanced_start: a cut whose slowest rank
    does the least work, the descent's first start.
    """

    schedule: Schedule
    micro_batches: int
    stages: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    per_stage_seconds: tuple[float, float]
    send_seconds: float
    once_per_step_seconds: tuple[float, ...]
    balanced_start: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.forward_seconds) - 1


@functools.lru_cache(maxsize=8192)
def fastest_boundaries(pipeline_blocks: PipelineBlocks) -> tuple[int, ...]:
    """Boundaries of non-empty stages, counted in blocks; there are at least as many blocks as
    stages."""
    found = fastest_boundaries_where(pipeline_blocks, lambda cut: True)
    assert found is not None, "every cut is allowed"
    return found


def fastest_boundaries_where(
    pipeline_blocks: PipelineBlocks,
    is_allowed: Callable[[tuple[int, ...]], bool],
    start: tuple[int, ...] | None = None,
) -> tuple[int, ...] | None:
    """Return the fastest allowed cut; None where none is found. start: an allowed cut, where one
    is known."""
    best = _Descent(pipeline_blocks, is_allowed, 0)
    if math.comb(pipeline_blocks.blocks - 1, pipeline_blocks.stages - 1) <= MAX_EXHAUSTIVE:
        best.improve(_all_cuts(pipeline_blocks.blocks, pipeline_blocks.stages), math.inf)
        return best.best
    known = [] if start is None else [start]
    starts = np.array(list(dict.fromkeys([*known, *_starts(pipeline_blocks)])))
    steps = step_seconds(pipeline_blocks, starts)
    tried, (descents, arrays) = 0, _effort(pipeline_blocks)
    for index in np.argsort(np.round(steps / steps.max(), 9), kind="stable"):
        cut = _as_tuple(starts[index])
        if tried == descents or not is_allowed(cut):
            continue
        tried += 1
        descent = _Descent(pipeline_blocks, is_allowed, arrays, cut, float(steps[index]))
        while descent.improve(_neighbours(cut), descent.step_seconds * (1 - MIN_GAIN), first=True):
            cut = descent.best or cut
        if descent.step_seconds < best.step_seconds * (1 - TIE_TOLERANCE):
            best = descent
    return best.best


def _effort(pipeline_blocks: PipelineBlocks) -> tuple[int, int]:
    has_form = (
        pipeline_blocks.schedule == "1f1b"
        and pipeline_blocks.micro_batches >= pipeline_blocks.stages
    )
    table = EFFORT if has_form else EFFORT_WITHOUT_CLOSED_FORM
    return next(
        (descents, arrays) for most, descents, arrays in table if pipeline_blocks.stages <= most
    )


class _Descent:
    """Holds the best cut so far, and how many more batches of cuts may be simulated."""

    def __init__(
        self,
        pipeline_blocks: PipelineBlocks,
        is_allowed: Callable[[tuple[int, ...]], bool],
        arrays: int,
        best: tuple[int, ...] | None = None,
        step_seconds: float = math.inf,
    ) -> None:
        self.pipeline_blocks, self.is_allowed, self.best, self.step_seconds = (
            pipeline_blocks,
            is_allowed,
            best,
            step_seconds,
        )
        self._arrays = arrays

    def improve(self, cuts: BoundaryArray, limit_seconds: float, *, first: bool = False) -> bool:
        """Move to the fastest allowed cut that takes less than the limit, and return whether
        there is one. first: stop at the first batch that has one. Of equal cuts, the first wins."""
        bounds = _lower_bounds(self.pipeline_blocks, cuts)
        order = np.argsort(np.round(bounds / bounds.max(initial=1e-300), 9), kind="stable")
        size = max(4, BATCH_SIZE // self.pipeline_blocks.stages**2)
        if (
            PIPELINE_SCHEDULES[self.pipeline_blocks.schedule].is_v_shaped
            or self.pipeline_blocks.micro_batches < self.pipeline_blocks.stages
        ):
            size = max(16, BATCH_SIZE_SIMULATED // self.pipeline_blocks.stages)
        found = False
        for at in range(0, len(cuts), size):
            chosen = order[at : at + size]
            chosen = chosen[bounds[chosen] < limit_seconds * (1 - TIE_TOLERANCE)]
            if not len(chosen) or (found and first) or (first and not self._arrays):
                break
            self._arrays -= first
            steps = step_seconds(self.pipeline_blocks, cuts[chosen])
            for index in np.argsort(np.round(steps / steps.max(), 9), kind="stable"):
                if steps[index] >= limit_seconds * (1 - TIE_TOLERANCE):
                    break
                cut = _as_tuple(cuts[chosen[index]])
                if self.is_allowed(cut):
                    self.best, self.step_seconds, limit_seconds, found = (
                        cut,
                        steps[index],
                        steps[index],
                        True,
                    )
                    break
        return found


def step_seconds(pipeline_blocks: PipelineBlocks, cuts: BoundaryArray) -> Floats:
    """Return the simulated step seconds of each cut."""
    forward, backward = _stage_seconds(pipeline_blocks, cuts)
    schedule = step_seconds_of_partitions(
        pipeline_blocks.schedule,
        pipeline_blocks.micro_batches,
        forward,
        backward,
        pipeline_blocks.send_seconds,
    )
    return schedule + _after_seconds(pipeline_blocks, cuts)


def _after_seconds(pipeline_blocks: PipelineBlocks, cuts: BoundaryArray) -> Floats:
    after = _stage_sums(pipeline_blocks.once_per_step_seconds, cuts)
    if PIPELINE_SCHEDULES[pipeline_blocks.schedule].is_v_shaped:
        after = (
            after[:, : pipeline_blocks.stages // 2]
            + after[:, : pipeline_blocks.stages // 2 - 1 : -1]
        )
    longest: Floats = after.max(axis=1)
    return longest


def _starts(pipeline_blocks: PipelineBlocks) -> list[tuple[int, ...]]:
    """Return starts of the descent: the balanced one, DeepSpeed's `uniform`, and cuts that are
    even in one measure, tilted to the front by TILTS. Each boundary is where the running sum
    comes nearest to its share."""
    seconds = np.add(pipeline_blocks.forward_seconds, pipeline_blocks.backward_seconds)
    stages = np.arange(1, pipeline_blocks.stages)
    share = stages / pipeline_blocks.stages
    each, left = divmod(pipeline_blocks.blocks, pipeline_blocks.stages)
    cuts = [
        pipeline_blocks.balanced_start,
        tuple(each * s + min(s, left) for s in range(pipeline_blocks.stages + 1)),
    ]
    blocks = np.arange(pipeline_blocks.blocks + 1)
    between = np.clip(blocks - 1, 0, pipeline_blocks.blocks - 2)
    # In seconds, in blocks, in decoder layers alone, as if the first block were as slow as the
    # last, and in what a rank does once a step.
    even = [seconds, blocks, between, seconds + np.minimum(blocks, 1) * (seconds[-1] - seconds[-2])]
    if pipeline_blocks.once_per_step_seconds[-1] > 0:
        even.append(np.array(pipeline_blocks.once_per_step_seconds))
    wanted = share + np.array(TILTS)[:, None] * share * (1 - share)
    for sums in even:
        nearest = np.searchsorted((sums[:-1] + sums[1:]) / 2, sums[-1] * wanted, side="right")
        spread = np.maximum.accumulate(nearest - stages, axis=1) + stages
        inner = np.clip(spread, stages, pipeline_blocks.blocks - pipeline_blocks.stages + stages)
        cuts += [(0, *cut, pipeline_blocks.blocks) for cut in inner.tolist()]
    return cuts


def _as_tuple(cut: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(cut.tolist())


def _neighbours(cut: tuple[int, ...]) -> BoundaryArray:
    cuts: BoundaryArray = np.array(cut) + _moves(len(cut) - 1)
    return cuts[(cuts[:, 1:] > cuts[:, :-1]).all(axis=1)]


@functools.lru_cache(maxsize=256)
def _all_cuts(blocks: int, stages: int) -> BoundaryArray:
    inner = itertools.combinations(range(1, blocks), stages - 1)
    return np.array([(0, *cut, blocks) for cut in inner])


@functools.lru_cache(maxsize=256)
def _moves(stages: int) -> BoundaryArray:
    """Return moves of one block from one stage to another; every boundary between them moves
    along. With many stages, only moves between neighbours and to and from the first and the
    last."""
    moves = []
    for a, b in itertools.combinations(range(stages), 2):
        if stages <= ALL_PAIRS or a == 0 or b == stages - 1 or b - a == 1:
            move = [int(a < i <= b) for i in range(stages + 1)]
            moves += [move, [-x for x in move]]
    return np.array(moves, dtype=np.int64).reshape(-1, stages + 1)


def _stage_seconds(pipeline_blocks: PipelineBlocks, cuts: BoundaryArray) -> tuple[Floats, Floats]:
    forward = (
        _stage_sums(pipeline_blocks.forward_seconds, cuts) + pipeline_blocks.per_stage_seconds[0]
    )
    backward = (
        _stage_sums(pipeline_blocks.backward_seconds, cuts) + pipeline_blocks.per_stage_seconds[1]
    )
    return forward, backward


def _stage_sums(sums: tuple[float, ...], cuts: BoundaryArray) -> Floats:
    """Sum each stage's part of the prefix sums; np.diff takes three times as long on arrays this
    small."""
    at = np.array(sums)[cuts]
    result: Floats = at[:, 1:] - at[:, :-1]
    return result


def _lower_bounds(pipeline_blocks: PipelineBlocks, cuts: BoundaryArray) -> Floats:
    """Return a lower bound of each cut's step seconds.

    A rank starts after one forward pass of each rank before it, and has m of both passes. It
    ends one backward pass of each of those ranks before the step ends. Under 1F1B it also waits
    once for a micro-batch to come back from the ranks after it: after its first m' = min(p -
    rank, m) forward passes at the start, and before its last m' backward passes at the end.
    """
    forward, backward = _stage_seconds(pipeline_blocks, cuts)
    both, m = forward + backward, pipeline_blocks.micro_batches
    if PIPELINE_SCHEDULES[pipeline_blocks.schedule].is_v_shaped:
        ranks = pipeline_blocks.stages // 2
        front = both[:, :ranks]
        loads = front + both[:, : ranks - 1 : -1]
        bounds: Floats = (np.cumsum(front, axis=1) - front + m * loads).max(axis=1)
        return bounds + _after_seconds(pipeline_blocks, cuts)
    total = both.sum(axis=1, keepdims=True)
    ahead = np.minimum(pipeline_blocks.stages - np.arange(pipeline_blocks.stages), m)
    own = np.cumsum(both, axis=1) - both + m * both
    start = total + (m - ahead) * forward + (m - 1) * backward
    end = total + (m - 1) * forward + (m - ahead) * backward
    waiting: Floats = np.maximum(own, np.maximum(start, end)).max(axis=1)
    return waiting + _after_seconds(pipeline_blocks, cuts)


class StageCosts(Protocol):
    """Costs any run of layers as a stage of one layout. Prefix sums have one entry more than
    graph.layers; seconds are of one micro-batch, as in PipelineBlocks."""

    @property
    def forward_seconds(self) -> tuple[float, ...]: ...
    @property
    def backward_seconds(self) -> tuple[float, ...]: ...
    @property
    def once_per_step_seconds(self) -> tuple[float, ...]: ...
    @property
    def per_stage_seconds(self) -> tuple[float, float]: ...
    @property
    def send_seconds(self) -> float: ...
    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a rank may hold at most."""

    @property
    def bytes_with_headroom(self) -> int:
        """Return the bytes that leave the prediction's error free."""

    @property
    def least_bytes(self) -> float:
        """Return bytes that no assignment's peak-memory rank is below."""

    def held(self, start: int, stop: int) -> tuple[float, float]:
        """Return measures that a rank's peak grows with: parameters, and saved activation bytes."""

    def peak_bytes(self, rank: int, bounds: tuple[int, ...]) -> int:
        """Return a pipeline rank's peak. bounds: start and stop of each of its stages."""


def assign_stages(
    recipe: Recipe, graph: ModelGraph, strategy: Layout, prices: StageCosts
) -> tuple[int, ...]:
    """Boundaries over graph.layers, stages + 1 of them; every stage holds at least one layer, and
    layers that share parameters or state are on one. Where there are too few layers (a rule forbids
    it), some stages are empty. With virtual stages those of all parts."""
    s = strategy
    if s.is_interleaved:
        return assign_interleaved_stages(recipe, graph, s.total_stages)
    if max_stages(graph) < s.stages:
        return _with_empty_stages(len(graph.layers), s.stages)
    if (
        kernel_profile(
            recipe.assume.kernels, graph.model_type, recipe.target
        ).equal_layers_per_stage
        and graph.decoder_layers % s.stages == 0
    ):
        return _equal_decoder_layers(graph, s.stages)
    if traits_of(recipe.target, recipe.assume.kernels, s).balances_stages_by_matmul_flops:
        return _equal_matmul_flops(graph, s.stages)
    blocks = graph.cut.blocks(graph.decoder_layers)
    length = recipe.training.sequence_length
    # A backward pass is two forward passes to a decoder layer; of a tower it may be less.
    vision_encoder_flops_per_token = sum(vision_encoder_flops(recipe, graph)) // 3 // length
    balanced = balanced_boundaries(
        graph, length, s.stages, s.schedule, vision_encoder_flops_per_token
    )
    best = balanced if s.pipeline == 1 else _best_boundaries(recipe, s, prices, blocks, balanced)
    return boundaries_in_layers(best, blocks)


def assign_interleaved_stages(recipe: Recipe, graph: ModelGraph, parts: int) -> tuple[int, ...]:
    """Return the boundaries of an interleaved pipeline; they depend on the number of parts
    alone."""
    if len(graph.layers) < parts:
        return _with_empty_stages(len(graph.layers), parts)
    if (
        kernel_profile(
            recipe.assume.kernels, graph.model_type, recipe.target
        ).equal_layers_per_stage
        and graph.decoder_layers % parts == 0
    ):
        return _equal_decoder_layers(graph, parts)
    return balanced_interleaved_boundaries(graph, recipe.training.sequence_length, parts)


def _equal_decoder_layers(graph: ModelGraph, parts: int) -> tuple[int, ...]:
    each = graph.decoder_layers // parts
    return (0, *(1 + each * part for part in range(1, parts)), len(graph.layers))


def _equal_matmul_flops(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """Cut where the layers' matrix products, the head's included, reach each stage's share
    (nanotron's build_model). The last stages hold at least one layer each."""
    products = list(itertools.accumulate(layer.matmul_flops_per_token for layer in graph.layers))
    bounds = [0]
    for stage in range(1, stages):
        past = bisect.bisect_left(products, products[-1] * stage / stages) + 1
        bounds.append(max(bounds[-1] + 1, min(past, len(graph.layers) - (stages - stage))))
    return (*bounds, len(graph.layers))


def _best_boundaries(
    recipe: Recipe,
    s: Layout,
    prices: StageCosts,
    blocks: tuple[int, ...],
    balanced: tuple[int, ...],
) -> tuple[int, ...]:
    if s.pipeline_schedule.is_v_shaped and s.pipeline > MAX_SIMULATED_DUALPIPEV_RANKS:
        return balanced
    pipeline_blocks = _pipeline_blocks(s, prices, blocks, balanced)
    if recipe.assume.ignore_memory:
        return fastest_boundaries(pipeline_blocks)
    memory = _MemoryLimit(s, prices, blocks)
    limits = [prices.usable_bytes]
    if recipe.parallelism.memory_headroom is None:
        # What predictions fall short by stays free, where that is possible.
        limits.insert(0, min(limits[0], prices.bytes_with_headroom))
    if prices.least_bytes > limits[-1] or not memory.any_boundaries_fit(balanced, limits[-1]):
        return balanced  # nothing fits: no cut is worth more
    for limit_bytes in limits:
        start: tuple[int, ...] | None = balanced
        if memory.fits(balanced, limit_bytes):
            best = fastest_boundaries(pipeline_blocks)
            if memory.fits(best, limit_bytes):
                return best
        else:
            start = memory.greedy_boundaries(pipeline_blocks.stages, limit_bytes)
            if start is None and not memory.has_two_stages_per_rank:
                continue
        found = fastest_boundaries_where(
            pipeline_blocks, functools.partial(memory.fits, limit_bytes=limit_bytes), start
        )
        if found is not None:
            return found
    return balanced


class _MemoryLimit:
    """Checks whether a cut's pipeline ranks fit in memory; caches the peak of each run of
    layers."""

    def __init__(self, s: Layout, prices: StageCosts, blocks: tuple[int, ...]) -> None:
        self._prices = prices
        self.has_two_stages_per_rank = s.pipeline_schedule.is_v_shaped
        self._layers = (0, *itertools.accumulate(blocks))
        self._peaks: dict[tuple[int, ...], int] = {}

    def fits(self, cut: tuple[int, ...], limit_bytes: int) -> bool:
        if self.has_two_stages_per_rank:
            last = len(cut) - 1
            held = [
                (r, cut[r], cut[r + 1], cut[last - 1 - r], cut[last - r]) for r in range(last // 2)
            ]
            return all(self._peak_bytes(*h) <= limit_bytes for h in held)
        # Fewer micro-batches are in flight on later ranks, so one that holds no more than an
        # earlier one has room.
        seen: list[tuple[float, float]] = []
        last = len(cut) - 2
        for rank, (first, stop) in enumerate(itertools.pairwise(cut)):
            holds = self._prices.held(self._layers[first], self._layers[stop])
            if rank < last and any(all(map(operator.le, holds, before)) for before in seen):
                continue
            if self._peak_bytes(rank, first, stop) > limit_bytes:
                return False
            seen.append(holds)
        return True

    def any_boundaries_fit(self, balanced: tuple[int, ...], limit_bytes: int) -> bool:
        """Return False where no cut fits; True for DualPipeV, whose ranks hold two stages, so
        that it is not known."""
        return (
            self.has_two_stages_per_rank
            or self.fits(balanced, limit_bytes)
            or self.greedy_boundaries(len(balanced) - 1, limit_bytes) is not None
        )

    def greedy_boundaries(self, stages: int, limit_bytes: int) -> tuple[int, ...] | None:
        """Give each stage as many blocks as it has memory for. If that does not place all of
        them, no cut does: a stage's memory grows with its blocks and falls with its number. None
        there, and for DualPipeV, whose ranks hold two stages."""
        if self.has_two_stages_per_rank:
            return None
        cut, held = [0], 1
        for rank in range(stages):
            start, last = (
                cut[-1],
                len(self._layers) - stages + rank,
            )  # one block for each stage that follows
            # Later stages have room for as many blocks or a few more, but for the last, which has
            # the head.
            stop = min(start + held, last)
            if rank == 0 or self._peak_bytes(rank, start, stop) > limit_bytes:
                more = range(start + 1, last + 1)
                fitting = bisect.bisect_right(
                    more, limit_bytes, key=lambda b: self._peak_bytes(rank, start, b)
                )
                if not fitting:
                    return None
                stop = more[fitting - 1]
            while stop < last and self._peak_bytes(rank, start, stop + 1) <= limit_bytes:
                stop += 1
            held = stop - start
            cut.append(stop)
        return tuple(cut) if cut[-1] == len(self._layers) - 1 else None

    def _peak_bytes(self, rank: int, *bounds: int) -> int:
        """Return a rank's peak. bounds: first and last + 1 block of each of its stages."""
        key = (rank, *bounds)
        peak = self._peaks.get(key)
        if peak is None:
            layers = tuple([self._layers[b] for b in bounds])
            peak = self._peaks[key] = self._prices.peak_bytes(rank, layers)
        return peak


def _pipeline_blocks(
    s: Layout, prices: StageCosts, blocks: tuple[int, ...], balanced_start: tuple[int, ...]
) -> PipelineBlocks:
    starts, m = (0, *itertools.accumulate(blocks)), s.gradient_accumulation_steps
    return PipelineBlocks(
        schedule=s.schedule,
        # Fewer are refused for DualPipeV; the cut is then the one of the fewest that run.
        micro_batches=max(m, s.pipeline_schedule.min_micro_batches(s.pipeline)),
        stages=s.stages,
        forward_seconds=tuple([prices.forward_seconds[i] for i in starts]),
        backward_seconds=tuple([prices.backward_seconds[i] for i in starts]),
        per_stage_seconds=prices.per_stage_seconds,
        send_seconds=prices.send_seconds,
        once_per_step_seconds=tuple([prices.once_per_step_seconds[i] for i in starts]),
        balanced_start=balanced_start,
    )


def _with_empty_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Leave some stages empty: more stages than layers is forbidden, but figures are still
    given."""
    return (*(min(s, layers) for s in range(stages)), layers)
