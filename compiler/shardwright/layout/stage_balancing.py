"""Split layers into contiguous stages so that the slowest pipeline rank does the least work.

DeepSpeed's `partition_method: parameters` charges the embedding lookup as compute (measured: up to
25 % slower). Here a layer costs its forward FLOPs; the head counts, the lookup is nearly free. The
search for the fastest stages starts from this split and continues with the simulated schedule.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Layout
from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Schedule


def layer_flops_per_token(
    graph: ModelGraph, sequence_length: int, vision_encoder_flops_per_token: int = 0
) -> tuple[int, ...]:
    """Return each layer's forward FLOPs per token at this sequence length, at least 1.

    vision_encoder_flops_per_token: what the first layer computes besides the lookup
    """
    first, *others = (
        max(
            1,
            layer.matmul_flops_per_token
            + layer.attention_flops_per_token_per_position * sequence_length,
        )
        for layer in graph.layers
    )
    return first + vision_encoder_flops_per_token, *others


def max_stages(graph: ModelGraph) -> int:
    """Return the largest number of stages that the layers can be split into."""
    return len(graph.cut.blocks(graph.decoder_layers))


@functools.lru_cache(maxsize=256)
def _block_costs(
    graph: ModelGraph, sequence_length: int, vision_encoder_flops_per_token: int
) -> tuple[int, ...]:
    costs = iter(layer_flops_per_token(graph, sequence_length, vision_encoder_flops_per_token))
    return tuple(
        sum(itertools.islice(costs, size)) for size in graph.cut.blocks(graph.decoder_layers)
    )


def balanced_boundaries(
    graph: ModelGraph,
    sequence_length: int,
    stages: int,
    schedule: Schedule,
    vision_encoder_flops_per_token: int = 0,
) -> tuple[int, ...]:
    """Return boundaries in blocks of layers that must stay together; there must be enough blocks.

    vision_encoder_flops_per_token: as layer_flops_per_token takes it
    """
    costs = _block_costs(graph, sequence_length, vision_encoder_flops_per_token)
    if PIPELINE_SCHEDULES[schedule].is_v_shaped:
        return balanced_dualpipev_boundaries(costs, stages)
    return balanced_contiguous_boundaries(costs, stages)


@functools.lru_cache(maxsize=4096)
def balanced_interleaved_boundaries(
    graph: ModelGraph, sequence_length: int, parts: int
) -> tuple[int, ...]:
    """Return boundaries, in layers, of an interleaved schedule's stages.

    The slowest stage sets the pace. There must be enough layers, and no two that must stay
    together.
    """
    return balanced_contiguous_boundaries(layer_flops_per_token(graph, sequence_length), parts)


def max_decoder_layers_per_stage(graph: ModelGraph, layout: Layout) -> int:
    """Return the decoder layers of a larger stage where they are split evenly."""
    return -(-graph.decoder_layers // layout.total_stages)


def too_few_layers_error(graph: ModelGraph, layout: Layout) -> Diagnostic:
    """Return SW3106: the pipeline has more stages than the model can fill."""
    blocks = max_stages(graph)
    most = layout.pipeline_schedule.ranks(blocks)
    layers = f"{len(graph.layers)} layers to put on them"
    shared = ", ".join(f"{first} to {last}" for first, last in graph.cut.together)
    if shared:
        layers = f"{blocks} groups of layers that can be separated"
        shared = f" Decoder layers {shared} share parameters or state and must stay on one stage."
    return Diagnostic(
        code="SW3106",
        message=f"pipeline {layout.pipeline} ({layout.schedule}) makes {layout.stages} stages, "
        f"but the model has {layers}",
        help=f"The layers are the embedding, {graph.decoder_layers} decoder layers and the "
        f"head.{shared} "
        f"Use pipeline <= {most}, or {'another' if shared else 'a deeper'} model.",
        key=("parallelism", "pipeline"),
        valid=(str(most),),
    )


@functools.lru_cache(maxsize=4096)
def balanced_contiguous_boundaries(costs: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return contiguous non-empty stages with the least slowest stage.

    Among those splits, the one with the least sum of squares wins (the most even), then the
    earliest boundaries. A dynamic programme over (stages used, layers assigned) is exact in
    integers.
    """
    layers = len(costs)
    sums = [0, *itertools.accumulate(costs)]

    def is_enough(limit: int) -> bool:
        used, load = 1, 0
        for cost in costs:
            if load + cost > limit:
                used, load = used + 1, 0
            load += cost
        return used <= stages

    least = max(costs)
    limit = least + bisect.bisect_left(range(least, sum(costs)), True, key=is_enough)
    # best[i]: (sum of squares, boundaries) of the first i layers on `stage` stages.
    best: list[tuple[int, tuple[int, ...]] | None] = [None] * (layers + 1)
    best[0] = (0, (0,))
    for stage in range(1, stages + 1):
        following: list[tuple[int, tuple[int, ...]] | None] = [None] * (layers + 1)
        for stop in range(stage, layers - (stages - stage) + 1):
            earliest = bisect.bisect_left(sums, sums[stop] - limit, stage - 1, stop)
            following[stop] = min(
                (
                    (before[0] + (sums[stop] - sums[start]) ** 2, (*before[1], stop))
                    for start in range(earliest, stop)
                    if (before := best[start]) is not None
                ),
                default=None,
            )
        best = following
    last = best[layers]
    assert last is not None, "the limit came from a split that exists"
    return last[1]


@functools.lru_cache(maxsize=1024)
def balanced_dualpipev_boundaries(costs: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return non-empty DualPipeV stages with the least slowest rank; rank r holds r and stages-1-r.

    Bisects over the answer, to a thousandth of it. For one answer, the outer ranks are assigned
    from both ends inwards, and every reachable pair of edges (i, j) with layers [i, j) left over is
    kept.
    """
    sums = [0, *itertools.accumulate(costs)]
    even = balanced_contiguous_boundaries(costs, stages)
    loads = [sums[stop] - sums[start] for start, stop in itertools.pairwise(even)]
    low, high = (
        max(-(-sums[-1] * 2 // stages), *costs),
        max(map(sum, zip(loads, reversed(loads), strict=True))),
    )
    while high - low > high // 1024:
        middle = (low + high) // 2
        if _final_edges(_edges_inwards(sums, stages // 2, middle)[-1], sums, middle) is None:
            low = middle + 1
        else:
            high = middle
    levels = _edges_inwards(sums, stages // 2, high)
    final = _final_edges(levels[-1], sums, high)
    assert final is not None, "the caller checked that there are at least as many layers as stages"
    i, j = final
    centre = min(range(i + 1, j), key=lambda m: (abs(2 * sums[m] - sums[i] - sums[j]), m))
    left, right = [i], [j]
    for level in reversed(levels[:-1]):
        # Take the outer edges whose two blocks are the most even, among those within the limit.
        _, a, b = min(
            (abs((sums[i] - sums[a]) - (sums[b] - sums[j])), a, b)
            for a, mask in level.items()
            if a < i
            for b in range(j + 1, bisect.bisect_right(sums, high - sums[i] + sums[a] + sums[j]))
            if mask >> b & 1
        )
        i, j = a, b
        left.append(i)
        right.append(j)
    return (*reversed(left), centre, *right)


def _edges_inwards(sums: list[int], ranks: int, limit: int) -> list[dict[int, int]]:
    """Map each left edge to a bit mask of its right edges within the limit, by number of outer
    ranks.

    A run of right edges leads to a run: the next edges of neighbours touch each other, unless a
    layer between them is too large to move.
    """
    layers = len(sums) - 1
    costs = [stop - start for start, stop in itertools.pairwise(sums)]
    levels = [{0: 1 << layers}]
    for rank in range(ranks - 1):
        inside = (
            ranks - rank - 1
        )  # the ranks left need two layers each at least, and can take `limit` each at most
        following: dict[int, int] = {}
        farthest = [bisect.bisect_right(sums, at + inside * limit) - 1 for at in sums]
        for i, mask in levels[-1].items():
            for first, last in _runs(mask):
                least, most = min(costs[first - 1 : last]), max(costs[first - 1 : last])
                for a in range(i + 1, last - 2 * inside):
                    rest = limit - (sums[a] - sums[i])
                    if rest < least:
                        break
                    nearest = max(first, a + 2 * inside + 1)
                    whole = rest >= most
                    for start, stop in (
                        [(nearest, last)] if whole else [(j, j) for j in range(nearest, last + 1)]
                    ):
                        low = max(
                            a + 2 * inside, bisect.bisect_left(sums, sums[start] - rest, a, start)
                        )
                        high = min(stop - 1, farthest[a])
                        if low <= high:
                            following[a] = following.get(a, 0) | (1 << (high + 1)) - (1 << low)
        levels.append(following)
    return levels


def _runs(mask: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last bit of each run of ones."""
    while mask:
        first = (mask & -mask).bit_length() - 1
        rest = ~(mask >> first)
        length = (rest & -rest).bit_length() - 1
        yield first, first + length - 1
        mask &= -1 << (first + length)


def _final_edges(level: dict[int, int], sums: list[int], limit: int) -> tuple[int, int] | None:
    """Return the first edges whose inner layers the last rank can hold, in two blocks."""
    for i in sorted(level):
        for j in range(i + 2, bisect.bisect_right(sums, sums[i] + limit)):
            if level[i] >> j & 1:
                return i, j
    return None
