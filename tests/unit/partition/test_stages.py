"""Stage 5a against brute force, and on real models."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.diagnostics import Refusal
from shardwright.ir.cut import Cut, boundaries_of_blocks, merged, sharing
from shardwright.ir.strategy import Strategy
from shardwright.partition.stages import cut_evenly, cut_mirrored, layer_costs, partition_stages
from tests.unit.model.factory import LLAMA_8B, LLAMA_70B, SMALL_LLAMA, graph_of, recipe_of


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
    assert cut_evenly(costs, stages) == best


@settings(max_examples=300, deadline=None)
@given(costs=COSTS, data=st.data())
def test_cut_mirrored_is_as_good_as_any_cut(costs: tuple[int, ...], data: st.DataObject) -> None:
    stages = 2 * data.draw(st.integers(1, len(costs) // 2))
    found = cut_mirrored(costs, stages)
    assert found in all_cuts(len(costs), stages)
    assert mirrored(loads(costs, found)) == min(mirrored(loads(costs, b)) for b in all_cuts(len(costs), stages))


def layout(pipeline: int, schedule: str = "1f1b") -> Strategy:
    return Strategy(
        tensor=1,
        pipeline=pipeline,
        data=1,
        zero_stage=1,
        micro_batch_size=1,
        gradient_accumulation_steps=16,
        activation_checkpointing="none",
        schedule=schedule,
        offload="none",
    )


def test_the_head_is_charged_and_the_lookup_is_not() -> None:
    """Llama-3.1-8B over 8: the head costs as much as 2.4 decoder layers, so the last stage gets fewer of them."""
    recipe = recipe_of(LLAMA_8B, training={"sequence_length": 8192})
    graph = graph_of(LLAMA_8B)
    partition = partition_stages(recipe, graph, layout(8))
    costs = layer_costs(graph, 8192)
    sizes = [b - a for a, b in itertools.pairwise(partition.boundaries)]
    assert costs[0] == 1
    assert sizes[-1] < max(sizes)
    equal = (0, 5, 9, 13, 17, 21, 25, 29, 34)  # four decoder layers each, embedding and head added at the ends
    assert max(loads(costs, partition.boundaries)) < max(loads(costs, equal))


def test_dualpipev_cuts_twice_as_many_stages() -> None:
    graph = graph_of(LLAMA_70B)
    partition = partition_stages(recipe_of(LLAMA_70B), graph, layout(4, "dualpipev"))
    assert partition.stages == 8
    assert partition.stages_of_pipeline_rank(0) == (0, 7)
    costs = layer_costs(graph, 128)
    even = sum(costs) / 4
    assert mirrored(loads(costs, partition.boundaries)) < 1.05 * even


@pytest.mark.parametrize(("pipeline", "schedule"), [(7, "1f1b"), (4, "dualpipev")])
def test_fewer_layers_than_stages(pipeline: int, schedule: str) -> None:
    with pytest.raises(Refusal) as caught:
        partition_stages(recipe_of(), graph_of(SMALL_LLAMA), layout(pipeline, schedule))
    (found,) = caught.value.diagnostics
    assert (found.code, found.key) == ("SW3106", ("parallelism", "pipeline"))
    assert found.valid == (("6",) if schedule == "1f1b" else ("3",))
    partition_stages(recipe_of(), graph_of(SMALL_LLAMA), layout(int(found.valid[0]), schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_layers_that_share_stay_on_one_stage(schedule: str) -> None:
    recipe, graph = recipe_of(SMALL_LLAMA), graph_of(SMALL_LLAMA)
    shared = dataclasses.replace(graph, cut=dataclasses.replace(graph.cut, together=((1, 2),)))
    degrees = {"1f1b": (2, 3, 4, 5), "dualpipev": (1, 2)}[schedule]
    for pipeline in degrees:
        strategy = layout(pipeline, schedule)
        boundaries = partition_stages(recipe, shared, strategy).boundaries
        assert len(boundaries) == strategy.stages + 1
        assert 3 not in boundaries, "layers[2] and layers[3] are decoder layers 1 and 2"
    with pytest.raises(Refusal) as refusal:
        partition_stages(recipe, shared, layout(degrees[-1] + 1, schedule))
    found = refusal.value.diagnostics[0]
    assert (found.code, found.valid) == ("SW3106", (str(degrees[-1]),))
    assert "Decoder layers 1 to 2 share parameters or state" in (found.help or "")


@given(ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_blocks_cover_every_layer_and_part_no_range(ranges: list[tuple[int, int]]) -> None:
    together = merged((min(r), max(r)) for r in ranges)
    cut = Cut(stack="s", hidden_position=0, hidden_keyword=None, output_length=0, together=together)
    blocks = cut.blocks(10)
    assert sum(blocks) == 12 and blocks[0] == blocks[-1] == 1
    starts = set(boundaries_of_blocks(tuple(range(len(blocks) + 1)), blocks))
    inside = {layer + 1 for a, b in ranges for layer in range(min(a, b) + 1, max(a, b) + 1)}
    assert starts == set(range(13)) - inside


def test_layers_with_a_parameter_in_common() -> None:
    names = (("s.0.w", "s.4.w"), ("s.1.a",), ("s.5.x", "s.7.x"), ("head.w", "table.w"))
    assert sharing(names, "s") == ((0, 4), (5, 7))
