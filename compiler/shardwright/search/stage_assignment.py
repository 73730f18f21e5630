"""Layers -> pipeline stages. The one place that decides it, for the search, the estimate and the
compile.

The fastest placing by the simulated schedule, of those whose every rank keeps free what predictions
may fall short by; else of those that fit. Where nothing fits, the one whose slowest rank does the
least work.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from typing import Protocol

from shardwright.cost.vision_encoder_flops import tower_flops
from shardwright.engines.engine_table import traits_of
from shardwright.engines.kernel_traffic import KERNELS
from shardwright.layout.layout import Strategy
from shardwright.layout.pipeline_step_time import MOST_SIMULATED_RANKS
from shardwright.layout.stage_balancing import interleaved_cut, least_slowest_cut, most_stages
from shardwright.models.model_graph import ModelGraph
from shardwright.models.pipeline_split import boundaries_of_blocks
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.simulated_stage_boundaries import Row, fastest_cut, fastest_cut_that


class StagePrices(Protocol):
    """What any run of layers costs as a stage of one strategy, by the cost model. Prefix sums have
    an entry more than graph.layers; seconds are of one micro-batch, as in Row."""

    @property
    def forward_seconds(self) -> tuple[float, ...]: ...
    @property
    def backward_seconds(self) -> tuple[float, ...]: ...
    @property
    def after_seconds(self) -> tuple[float, ...]: ...
    @property
    def per_stage_seconds(self) -> tuple[float, float]: ...
    @property
    def send_seconds(self) -> float: ...
    @property
    def usable_bytes(self) -> int:
        """What a rank may hold at most."""

    @property
    def cautious_bytes(self) -> int:
        """As much as leaves free what predictions may fall short by."""

    @property
    def least_bytes(self) -> float:
        """What the fullest rank of no placing is below."""

    def held(self, start: int, stop: int) -> tuple[float, float]:
        """Measures that a rank's peak grows with: parameters, and kept bytes."""

    def peak_bytes(self, rank: int, bounds: tuple[int, ...]) -> int:
        """bounds: start and stop of each of the pipeline rank's stages."""


def place_layers(
    recipe: Recipe, graph: ModelGraph, strategy: Strategy, prices: StagePrices
) -> tuple[int, ...]:
    """Boundaries over graph.layers, stages + 1 of them; every stage holds at least one layer, and
    layers that share parameters or state are on one. Where there are too few layers (a rule forbids
    it), some stages are empty. With virtual stages those of all parts."""
    s = strategy
    if s.interleaves:
        return place_parts(recipe, graph, s.parts)
    if most_stages(graph) < s.stages:
        return _thin(len(graph.layers), s.stages)
    if KERNELS[recipe.assume.kernels].even_stages and graph.decoder_layers % s.stages == 0:
        return _even_decoders(graph, s.stages)
    if traits_of(recipe.target, recipe.assume.kernels, s).places_by_products:
        return _by_products(graph, s.stages)
    blocks = graph.cut.blocks(graph.decoder_layers)
    length = recipe.training.sequence_length
    # A backward pass is two forward passes to a decoder layer; of a tower it may be less.
    tower = sum(tower_flops(recipe, graph)) // 3 // length
    plain = least_slowest_cut(graph, length, s.stages, s.schedule, tower)
    best = plain if s.pipeline == 1 else _best_cut(recipe, s, prices, blocks, plain)
    return boundaries_of_blocks(best, blocks)


def place_parts(recipe: Recipe, graph: ModelGraph, parts: int) -> tuple[int, ...]:
    """Of an interleaved pipeline, whatever else the layout is."""
    if len(graph.layers) < parts:
        return _thin(len(graph.layers), parts)
    if KERNELS[recipe.assume.kernels].even_stages and graph.decoder_layers % parts == 0:
        return _even_decoders(graph, parts)
    return interleaved_cut(graph, recipe.training.sequence_length, parts)


def _even_decoders(graph: ModelGraph, parts: int) -> tuple[int, ...]:
    each = graph.decoder_layers // parts
    return (0, *(1 + each * part for part in range(1, parts)), len(graph.layers))


def _by_products(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """A stage ends with the layer whose products reach its share of the model's, the head's among
    them (nanotron's build_model). The last stages hold at least one layer each."""
    products = list(itertools.accumulate(layer.matmul_flops_per_token for layer in graph.layers))
    bounds = [0]
    for stage in range(1, stages):
        past = bisect.bisect_left(products, products[-1] * stage / stages) + 1
        bounds.append(max(bounds[-1] + 1, min(past, len(graph.layers) - (stages - stage))))
    return (*bounds, len(graph.layers))


def _best_cut(
    recipe: Recipe,
    s: Strategy,
    prices: StagePrices,
    blocks: tuple[int, ...],
    plain: tuple[int, ...],
) -> tuple[int, ...]:
    if s.schedule == "dualpipev" and s.pipeline > MOST_SIMULATED_RANKS:
        return plain
    row = _row(s, prices, blocks, plain)
    if recipe.assume.ignore_memory:
        return fastest_cut(row)
    room = _Room(s, prices, blocks)
    limits = [prices.usable_bytes]
    if recipe.parallelism.memory_headroom is None:
        # What predictions fall short by stays free, where that is possible.
        limits.insert(0, min(limits[0], prices.cautious_bytes))
    if prices.least_bytes > limits[-1] or not room.fits_somehow(plain, limits[-1]):
        return plain  # nothing fits: no cut is worth more
    for limit_bytes in limits:
        start: tuple[int, ...] | None = plain
        if room.fits(plain, limit_bytes):
            best = fastest_cut(row)
            if room.fits(best, limit_bytes):
                return best
        else:
            start = room.fullest_first(row.stages, limit_bytes)
            if start is None and not room.holds_two:
                continue
        found = fastest_cut_that(row, functools.partial(room.fits, limit_bytes=limit_bytes), start)
        if found is not None:
            return found
    return plain


class _Room:
    """Whether a cut's pipeline ranks have room. What a rank holds of the same layers is worked out
    once."""

    def __init__(self, s: Strategy, prices: StagePrices, blocks: tuple[int, ...]) -> None:
        self._prices = prices
        self.holds_two = s.schedule == "dualpipev"
        self._layers = (0, *itertools.accumulate(blocks))
        self._peaks: dict[tuple[int, ...], int] = {}

    def fits(self, cut: tuple[int, ...], limit_bytes: int) -> bool:
        if self.holds_two:
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

    def fits_somehow(self, plain: tuple[int, ...], limit_bytes: int) -> bool:
        """False where no cut has room; for DualPipeV, whose ranks hold two stages, that is not
        known beforehand."""
        return (
            self.holds_two
            or self.fits(plain, limit_bytes)
            or self.fullest_first(len(plain) - 1, limit_bytes) is not None
        )

    def fullest_first(self, stages: int, limit_bytes: int) -> tuple[int, ...] | None:
        """Each stage takes as many blocks as it has room for: if that does not place all of them,
        no cut does, for a stage's memory grows with its blocks and falls with its number. None for
        DualPipeV, whose ranks hold two."""
        if self.holds_two:
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
        """bounds: first and last + 1 block of each of the rank's stages."""
        key = (rank, *bounds)
        peak = self._peaks.get(key)
        if peak is None:
            layers = tuple([self._layers[b] for b in bounds])
            peak = self._peaks[key] = self._prices.peak_bytes(rank, layers)
        return peak


def _row(
    s: Strategy, prices: StagePrices, blocks: tuple[int, ...], least_slowest: tuple[int, ...]
) -> Row:
    starts, m = (0, *itertools.accumulate(blocks)), s.gradient_accumulation_steps
    return Row(
        schedule=s.schedule,
        # Fewer are refused for DualPipeV; the cut is then the one of the fewest that run.
        micro_batches=max(m, 2 * s.pipeline) if s.schedule == "dualpipev" else m,
        stages=s.stages,
        forward_seconds=tuple([prices.forward_seconds[i] for i in starts]),
        backward_seconds=tuple([prices.backward_seconds[i] for i in starts]),
        per_stage_seconds=prices.per_stage_seconds,
        send_seconds=prices.send_seconds,
        after_seconds=tuple([prices.after_seconds[i] for i in starts]),
        least_slowest=least_slowest,
    )


def _thin(layers: int, stages: int) -> tuple[int, ...]:
    """More stages than layers is forbidden, but numbers are still given: some stages are empty."""
    return (*(min(s, layers) for s in range(stages)), layers)
