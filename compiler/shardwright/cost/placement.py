"""Stage 5a: layers -> pipeline stages. The one place that decides it, for the search, the estimate and the compile.

The fastest partition by the simulated schedule, of those whose every rank keeps free what predictions may fall short
by; else of those that fit. Where nothing fits, the one whose slowest rank does the least work.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator

from shardwright.cost.activations import activations
from shardwright.cost.compute import ELEMENT_BYTES
from shardwright.cost.constants import Constants, default_constants
from shardwright.cost.layout import Block, Layout
from shardwright.cost.memory import RankBytes, states_bytes, usable_bytes
from shardwright.cost.passes import FORWARD_SHARE, passes
from shardwright.cost.shapes import model_shapes
from shardwright.cost.timing import MOST_SIMULATED_RANKS, once_a_step_seconds
from shardwright.diagnostics import Refusal
from shardwright.engines.kernels import KERNELS
from shardwright.ir.cluster import Cluster
from shardwright.ir.cut import boundaries_of_blocks
from shardwright.ir.lora import adapters, target_modules
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.partition import StagePartition
from shardwright.ir.recipe import Recipe
from shardwright.layout.strategy import Strategy
from shardwright.partition.cuts import Row, fastest_cut, fastest_cut_that
from shardwright.partition.stages import least_slowest_cut, most_stages, too_few_layers
from shardwright.plan.build import accumulation_dtype


def partition_stages(recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> StagePartition:
    """Explicit boundaries over graph.layers; every stage holds at least one layer, and layers that share parameters or
    state are on one. Error: SW3106, too few layers."""
    if most_stages(graph) < strategy.stages:
        raise Refusal(too_few_layers(graph, strategy))
    boundaries = _boundaries(_unplaced(recipe, graph, cluster, strategy, default_constants()))
    partition = StagePartition(boundaries=boundaries, schedule=strategy.schedule)
    partition.verify(len(graph.layers))
    return partition


def make_layout(
    recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy, constants: Constants
) -> Layout:
    layout = _unplaced(recipe, graph, cluster, strategy, constants)
    return dataclasses.replace(layout, ranks=_ranks(strategy, _boundaries(layout)))


def _unplaced(recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy, constants: Constants) -> Layout:
    element_bytes = ELEMENT_BYTES[recipe.training.precision]
    sequence_length, checkpointing = recipe.training.sequence_length, strategy.activation_checkpointing
    return Layout(
        recipe=recipe,
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        constants=constants,
        shapes=model_shapes(graph, strategy.tensor),
        activations=activations(graph, sequence_length, element_bytes, checkpointing, recipe.assume.kernels),
        ranks=(),
        element_bytes=element_bytes,
        accumulation_dtype=accumulation_dtype(recipe.training),
        adapters=_adapters(recipe, graph),
    )


def _adapters(recipe: Recipe, graph: ModelGraph) -> tuple[int, ...]:
    lora = recipe.lora
    if lora is None:
        return ()
    names = target_modules(graph, lora)
    return (0, *itertools.accumulate(sum(adapters(layer, names, lora.rank)) for layer in graph.layers))


def _boundaries(layout: Layout) -> tuple[int, ...]:
    graph, s = layout.graph, layout.strategy
    if most_stages(graph) < s.stages:
        return _thin(len(graph.layers), s.stages)
    if KERNELS[layout.recipe.assume.kernels].even_stages and graph.decoder_layers % s.stages == 0:
        each = graph.decoder_layers // s.stages
        return (0, *(1 + each * stage for stage in range(1, s.stages)), len(graph.layers))
    blocks = graph.cut.blocks(graph.decoder_layers)
    plain = least_slowest_cut(graph, layout.recipe.training.sequence_length, s.stages, s.schedule)
    best = plain if s.pipeline == 1 else _best_cut(layout, blocks, plain)
    return boundaries_of_blocks(best, blocks)


def _best_cut(layout: Layout, blocks: tuple[int, ...], plain: tuple[int, ...]) -> tuple[int, ...]:
    if layout.strategy.schedule == "dualpipev" and layout.strategy.pipeline > MOST_SIMULATED_RANKS:
        return plain
    row = _row(layout, blocks, plain)
    if layout.recipe.assume.ignore_memory:
        return fastest_cut(row)
    room = _Room(layout, blocks)
    limits = [usable_bytes(layout)]
    if layout.recipe.parallelism.memory_headroom is None:
        # What predictions fall short by stays free, where that is possible.
        limits.insert(0, min(limits[0], int(layout.cluster.capacity_bytes * (1 - default_constants().memory_headroom))))
    # What no cut can be below: the states alone, spread evenly.
    least = sum(states_bytes(layout, layout.shapes.numel[-1] - layout.shapes.shared_numel)) / layout.strategy.pipeline
    if least > limits[-1] or not room.fits_somehow(plain, limits[-1]):
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
    """Whether a cut's pipeline ranks have room. What a rank holds of the same layers is worked out once."""

    def __init__(self, layout: Layout, blocks: tuple[int, ...]) -> None:
        self._layout, self._usable = layout, usable_bytes(layout)
        self._memory = RankBytes(layout)
        self._in_flight = [_in_flight(layout.strategy, rank) for rank in range(layout.strategy.pipeline)]
        self._layers = (0, *itertools.accumulate(blocks))
        self._peaks: dict[tuple[int, ...], int] = {}

    def fits(self, cut: tuple[int, ...], limit_bytes: int) -> bool:
        if self.holds_two:
            last = len(cut) - 1
            held = [(r, cut[r], cut[r + 1], cut[last - 1 - r], cut[last - r]) for r in range(last // 2)]
            return all(self._peak_bytes(*h) <= limit_bytes for h in held)
        # Fewer micro-batches are in flight on later ranks, so one that holds no more than an earlier one has room.
        seen: list[tuple[float, float, float]] = []
        last = len(cut) - 2
        for rank, (first, stop) in enumerate(itertools.pairwise(cut)):
            holds = self._held(first, stop)
            if rank < last and any(all(map(operator.le, holds, before)) for before in seen):
                continue
            if self._peak_bytes(rank, first, stop) > limit_bytes:
                return False
            seen.append(holds)
        return True

    def _held(self, first: int, stop: int) -> tuple[float, float, float]:
        """Parameters and kept bytes of these blocks."""
        a, b, kept = self._layers[first], self._layers[stop], self._layout.activations
        numel = self._layout.shapes.numel
        return numel[b] - numel[a], kept.whole[b] - kept.whole[a], kept.divided[b] - kept.divided[a]

    @property
    def holds_two(self) -> bool:
        return self._layout.strategy.schedule == "dualpipev"

    def fits_somehow(self, plain: tuple[int, ...], limit_bytes: int) -> bool:
        """False where no cut has room; for DualPipeV, whose ranks hold two stages, that is not known beforehand."""
        return (
            self.holds_two
            or self.fits(plain, limit_bytes)
            or self.fullest_first(len(plain) - 1, limit_bytes) is not None
        )

    def fullest_first(self, stages: int, limit_bytes: int) -> tuple[int, ...] | None:
        """Each stage takes as many blocks as it has room for: if that does not place all of them, no cut does, for a
        stage's memory grows with its blocks and falls with its number. None for DualPipeV, whose ranks hold two."""
        if self.holds_two:
            return None
        cut, held = [0], 1
        for rank in range(stages):
            start, last = cut[-1], len(self._layers) - stages + rank  # one block for each stage that follows
            # Later stages have room for as many blocks or a few more, but for the last, which has the head.
            stop = min(start + held, last)
            if rank == 0 or self._peak_bytes(rank, start, stop) > limit_bytes:
                more = range(start + 1, last + 1)
                fitting = bisect.bisect_right(more, limit_bytes, key=lambda b: self._peak_bytes(rank, start, b))
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
            layers = [self._layers[b] for b in bounds]
            held = tuple(map(Block, layers[::2], layers[1::2], self._in_flight[rank]))
            peak = self._peaks[key] = self._memory.peak_bytes(held, self._usable)
        return peak


def _row(layout: Layout, blocks: tuple[int, ...], least_slowest: tuple[int, ...]) -> Row:
    s, found = layout.strategy, passes(layout)
    starts = (0, *itertools.accumulate(blocks))
    forward = [found.forward_compute[i] + found.forward_comm[i] for i in starts]
    backward = [found.backward_compute[i] + found.backward_comm[i] for i in starts]
    m, after = s.gradient_accumulation_steps, once_a_step_seconds(layout)
    stages_a_rank = s.stages // s.pipeline
    return Row(
        schedule=s.schedule,
        # Fewer are refused for DualPipeV; the cut is then the one of the fewest that run.
        micro_batches=max(m, 2 * s.pipeline) if s.schedule == "dualpipev" else m,
        stages=s.stages,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        per_stage_seconds=(
            found.per_rank_seconds * FORWARD_SHARE / stages_a_rank,
            found.per_rank_seconds * (1 - FORWARD_SHARE) / stages_a_rank,
        ),
        send_seconds=found.send_seconds,
        after_seconds=tuple(after * layout.shapes.numel[i] for i in starts),
        least_slowest=least_slowest,
    )


def _in_flight(s: Strategy, rank: int) -> tuple[float, ...]:
    """Micro-batches whose activations each stage of the rank keeps at once: 1F1B min(p - rank, m); DualPipeV (arXiv
    2412.19437 and its V-shaped cut) min(2p - rank, m) on the outward half and min(rank + 1, m) on the returning one;
    interleaving by v adds the share (p - 1) / (p v) (arXiv 2205.05198)."""
    p, m, v = s.pipeline, s.gradient_accumulation_steps, s.virtual_stages
    if s.schedule == "dualpipev":
        return min(2 * p - rank, m), min(rank + 1, m)
    return (min(p - rank, m) * (1 + (p - 1) / (p * v) if v > 1 else 1.0),)


def _ranks(s: Strategy, parts: tuple[int, ...]) -> tuple[tuple[Block, ...], ...]:
    return tuple(
        tuple(
            Block(start=parts[stage], stop=parts[stage + 1], in_flight=flight)
            for stage, flight in zip((rank, s.stages - 1 - rank), _in_flight(s, rank), strict=False)
        )
        for rank in range(s.pipeline)
    )


def _thin(layers: int, stages: int) -> tuple[int, ...]:
    """More stages than layers is forbidden, but numbers are still given: some stages are empty."""
    return (*(min(s, layers) for s in range(stages)), layers)
