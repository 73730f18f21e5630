"""The least slowest rank against brute force, and the blocks that stay together."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.layout.stage_balancing import (
    balanced_contiguous_boundaries,
    balanced_dualpipev_boundaries,
)
from shardwright.models.model_graph import (
    PipelineSplit,
    boundaries_in_layers,
    layers_that_share_parameters,
    merge_overlapping_ranges,
)


def loads(costs: tuple[int, ...], boundaries: tuple[int, ...]) -> list[int]:
    return [sum(costs[a:b]) for a, b in itertools.pairwise(boundaries)]


def all_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in itertools.combinations(range(1, layers), stages - 1)]


def mirrored(stage_loads: list[int]) -> int:
    half = len(stage_loads) // 2
    return max(a + b for a, b in zip(stage_loads[:half], reversed(stage_loads), strict=False))


COSTS = st.lists(st.integers(1, 50), min_size=2, max_size=9).map(tuple)


@settings(max_examples=300, deadline=None)
@given(costs=COSTS, data=st.data())
def test_cut_evenly_is_the_best_of_all_cuts(costs: tuple[int, ...], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cuts = all_cuts(len(costs), stages)
    best = min(cuts, key=lambda b: (max(loads(costs, b)), sum(x * x for x in loads(costs, b)), b))
    assert balanced_contiguous_boundaries(costs, stages) == best


@settings(max_examples=300, deadline=None)
@given(costs=COSTS, data=st.data())
def test_cut_mirrored_is_as_good_as_any_cut(costs: tuple[int, ...], data: st.DataObject) -> None:
    stages = 2 * data.draw(st.integers(1, len(costs) // 2))
    found = balanced_dualpipev_boundaries(costs, stages)
    assert found in all_cuts(len(costs), stages)
    assert mirrored(loads(costs, found)) == min(
        mirrored(loads(costs, b)) for b in all_cuts(len(costs), stages)
    )


@given(ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_blocks_cover_every_layer_and_part_no_range(ranges: list[tuple[int, int]]) -> None:
    together = merge_overlapping_ranges((min(r), max(r)) for r in ranges)
    cut = PipelineSplit(
        stack="s", hidden_position=0, hidden_keyword=None, output_length=0, together=together
    )
    blocks = cut.blocks(10)
    assert sum(blocks) == 12 and blocks[0] == blocks[-1] == 1
    starts = set(boundaries_in_layers(tuple(range(len(blocks) + 1)), blocks))
    inside = {layer + 1 for a, b in ranges for layer in range(min(a, b) + 1, max(a, b) + 1)}
    assert starts == set(range(13)) - inside


def test_layers_with_a_parameter_in_common() -> None:
    names = (("s.0.w", "s.4.w"), ("s.1.a",), ("s.5.x", "s.7.x"), ("head.w", "table.w"))
    assert layers_that_share_parameters(names, "s") == ((0, 4), (5, 7))
