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

from shardwright.cost.vision_encoder_flops import vision_encoder_flops
from shardwright.engines.engine_table import traits_of
from shardwright.engines.kernel_traffic import KERNEL_TRAFFIC
from shardwright.layout.layout import Layout
from shardwright.layout.pipeline_step_time import MAX_SIMULATED_DUALPIPEV_RANKS
from shardwright.layout.stage_balancing import (
    balanced_boundaries,
    balanced_interleaved_boundaries,
    max_stages,
)
from shardwright.models.model_graph import ModelGraph
from shardwright.models.pipeline_split import boundaries_in_layers
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.simulated_stage_boundaries import (
    PipelineBlocks,
    fastest_boundaries,
    fastest_boundaries_where,
)


class StageCosts(Protocol):
    """What any run of layers costs as a stage of one strategy, by the cost model. Prefix sums have
    an entry more than graph.layers; seconds are of one micro-batch, as in Row."""

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
        """What a rank may hold at most."""

    @property
    def bytes_with_headroom(self) -> int:
        """As much as leaves free what predictions may fall short by."""

    @property
    def least_bytes(self) -> float:
        """What the fullest rank of no placing is below."""

    def held(self, start: int, stop: int) -> tuple[float, float]:
        """Measures that a rank's peak grows with: parameters, and kept bytes."""

    def peak_bytes(self, rank: int, bounds: tuple[int, ...]) -> int:
        """bounds: start and stop of each of the pipeline rank's stages."""


def assign_stages(
    recipe: Recipe, graph: ModelGraph, strategy: Layout, prices: StageCosts
) -> tuple[int, ...]:
    """Boundaries over graph.layers, stages + 1 of them; every stage holds at least one layer, and
    layers that share parameters or state are on one. Where there are too few layers (a rule forbids
    it), some stages are empty. With virtual stages those of all parts."""
    s = strategy
    if s.is_interleaved:
        return assign_interleaved_stages(recipe, graph, s.parts)
    if max_stages(graph) < s.stages:
        return _with_empty_stages(len(graph.layers), s.stages)
    if (
        KERNEL_TRAFFIC[recipe.assume.kernels].equal_layers_per_stage
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
    """Of an interleaved pipeline, whatever else the layout is."""
    if len(graph.layers) < parts:
        return _with_empty_stages(len(graph.layers), parts)
    if (
        KERNEL_TRAFFIC[recipe.assume.kernels].equal_layers_per_stage
        and graph.decoder_layers % parts == 0
    ):
        return _equal_decoder_layers(graph, parts)
    return balanced_interleaved_boundaries(graph, recipe.training.sequence_length, parts)


def _equal_decoder_layers(graph: ModelGraph, parts: int) -> tuple[int, ...]:
    each = graph.decoder_layers // parts
    return (0, *(1 + each * part for part in range(1, parts)), len(graph.layers))


def _equal_matmul_flops(graph: ModelGraph, stages: int) -> tuple[int, ...]:
    """A stage ends with the layer whose products reach its share of the model's, the head's among
    them (nanotron's build_model). The last stages hold at least one layer each."""
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
    if s.schedule == "dualpipev" and s.pipeline > MAX_SIMULATED_DUALPIPEV_RANKS:
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
    """Whether a cut's pipeline ranks have room. What a rank holds of the same layers is worked out
    once."""

    def __init__(self, s: Layout, prices: StageCosts, blocks: tuple[int, ...]) -> None:
        self._prices = prices
        self.has_two_stages_per_rank = s.schedule == "dualpipev"
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
        """False where no cut has room; for DualPipeV, whose ranks hold two stages, that is not
        known beforehand."""
        return (
            self.has_two_stages_per_rank
            or self.fits(balanced, limit_bytes)
            or self.greedy_boundaries(len(balanced) - 1, limit_bytes) is not None
        )

    def greedy_boundaries(self, stages: int, limit_bytes: int) -> tuple[int, ...] | None:
        """Each stage takes as many blocks as it has room for: if that does not place all of them,
        no cut does, for a stage's memory grows with its blocks and falls with its number. None for
        DualPipeV, whose ranks hold two."""
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
        """bounds: first and last + 1 block of each of the rank's stages."""
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
        micro_batches=max(m, 2 * s.pipeline) if s.schedule == "dualpipev" else m,
        stages=s.stages,
        forward_seconds=tuple([prices.forward_seconds[i] for i in starts]),
        backward_seconds=tuple([prices.backward_seconds[i] for i in starts]),
        per_stage_seconds=prices.per_stage_seconds,
        send_seconds=prices.send_seconds,
        once_per_step_seconds=tuple([prices.once_per_step_seconds[i] for i in starts]),
        balanced_start=balanced_start,
    )


def _with_empty_stages(layers: int, stages: int) -> tuple[int, ...]:
    """More stages than layers is forbidden, but numbers are still given: some stages are empty."""
    return (*(min(s, layers) for s in range(stages)), layers)
