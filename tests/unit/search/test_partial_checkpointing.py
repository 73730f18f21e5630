"""`activation_checkpointing: auto` recomputes as few layers as fit, where recomputing all fits and
none does not; more where fewer would make a pipeline's layers move to ranks that are then
slower."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.cost.peak_memory import bytes_with_headroom
from shardwright.diagnostics import Refusal
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.literal_types import CHECKPOINTING, PartialCheckpointing
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.layout_space import layout_space
from shardwright.search.layout_resolution import (
    estimate_layout,
    resolve_layout,
    with_partial_checkpointing,
)
from shardwright.search.layout_search import choose_layout, estimate_pinned_layout, search
from shardwright.search.plan_explanation import explain, why_not
from tests.unit.models.factory import LLAMA_8B, graph_of, model_section, problem_of, recipe_of

TRAINING = {"sequence_length": 8192, "global_batch_size": 64}
OPEN: dict[str, dict[str, object]] = {
    "zero-2": {"tensor": 1, "pipeline": 1, "zero_stage": 2, "micro_batch_size": 1},
    "zero-3": {"tensor": 1, "pipeline": 1, "zero_stage": 3, "micro_batch_size": 2},
    "pipeline": {"tensor": 1, "pipeline": 2, "micro_batch_size": 1, "schedule": "1f1b"},
    "dualpipev": {"tensor": 1, "pipeline": 2, "micro_batch_size": 1, "schedule": "dualpipev"},
}


def recipe(pins: dict[str, object], **more: Any) -> Recipe:
    return recipe_of(LLAMA_8B, training=TRAINING, parallelism=pins, **more)


def problem(pins: dict[str, object], **more: Any) -> Problem:
    return problem_of(recipe(pins, **more), graph_of(LLAMA_8B))


def with_layers(pins: dict[str, object], choice: object) -> Estimate:
    return estimate_pinned_layout(problem({**pins, "activation_checkpointing": choice}))


@pytest.mark.parametrize("name", OPEN)
def test_the_fewest_that_fit(name: str) -> None:
    pins = OPEN[name]
    best = choose_layout(problem(pins))
    choice, limit = (
        best.strategy.activation_checkpointing,
        bytes_with_headroom(best.memory.capacity_bytes),
    )
    assert isinstance(choice, PartialCheckpointing)
    none, full = with_layers(pins, "none"), with_layers(pins, "full")
    assert not none.memory.fits and full.memory.fits and best.memory.peak_bytes <= limit
    assert none.time.step_seconds < best.time.step_seconds < full.time.step_seconds
    assert (
        none.time.hardware_tflops_per_gpu < 1e4
        and best.time.model_tflops_per_gpu > full.time.model_tflops_per_gpu
    )
    # Pinned it is the same; one layer less leaves too little.
    assert with_layers(pins, choice) == best
    fewer = PartialCheckpointing(full=choice.full - 1) if choice.full > 1 else "none"
    assert with_layers(pins, fewer).memory.peak_bytes > limit


def test_more_where_fewer_move_layers() -> None:
    """Two or three layers a rank: kept whole, early ranks have room for one, and late ones would
    have five."""
    graph = build_model_graph(model_section(source="Qwen/Qwen3-235B-A22B"))
    asked = recipe_of(
        None,
        cluster={"nodes": 64, "gpu": "gb200-nvl-186gb"},
        training={"sequence_length": 6144, "global_batch_size": 1024},
        parallelism={
            "tensor": 2,
            "pipeline": 32,
            "expert": 4,
            "micro_batch_size": 1,
            "schedule": "1f1b",
        },
    )
    whole = problem_of(asked, graph)
    full = next(e for e in search(whole).ranked if e.strategy.activation_checkpointing == "full")
    layout, memory = resolve_layout(whole, full.strategy)
    found = with_partial_checkpointing(whole, layout, memory)
    assert found is not None
    assert found[0].strategy.activation_checkpointing == PartialCheckpointing(full=1)
    times = {}
    for choice in ("none", PartialCheckpointing(full=1), PartialCheckpointing(full=2), "full"):
        priced = estimate_layout(
            whole, dataclasses.replace(full.strategy, activation_checkpointing=choice)
        )
        assert priced.memory.fits
        times[str(choice)] = priced.time.step_seconds
    assert sorted(times, key=times.__getitem__) == ["{full: 1}", "{full: 2}", "full", "none"]


def test_it_stands_beside_what_recomputes_all() -> None:
    ranked = search(problem(OPEN["zero-2"])).ranked
    words = [str(e.strategy.activation_checkpointing) for e in ranked]
    assert words == ["{full: 19}", "full"]


def test_more_memory_recomputes_fewer_layers() -> None:
    layers = []
    for gib in (70, 80, 90, 100):
        asked = problem(OPEN["zero-2"])
        gpu = dataclasses.replace(asked.cluster.gpu, memory_gib=float(gib))
        choice = choose_layout(
            dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, gpu=gpu))
        ).strategy
        assert isinstance(choice.activation_checkpointing, PartialCheckpointing)
        layers.append(choice.activation_checkpointing.full)
    assert layers == sorted(set(layers), reverse=True)


@pytest.mark.parametrize(
    ("pins", "more"),
    [
        ({**OPEN["zero-2"], "data": 8}, {}),  # they fill the world: the rule for `auto`
        ({**OPEN["zero-2"], "activation_checkpointing": "full"}, {}),
        (OPEN["zero-2"], {"objective": "memory"}),
        (OPEN["zero-2"], {"assume": {"ignore_memory": True}}),
        ({**OPEN["zero-2"], "tensor": 8}, {}),  # recomputing none fits
    ],
)
def test_where_nobody_asks_for_it(pins: dict[str, object], more: dict[str, Any]) -> None:
    ranked = search(problem(pins, **more)).ranked
    assert ranked and {e.strategy.activation_checkpointing for e in ranked} <= set(CHECKPOINTING)


def test_a_pinned_headroom_is_kept() -> None:
    tight, wide = (
        choose_layout(problem({**OPEN["zero-2"], "memory_headroom": share}))
        for share in (0.02, 0.2)
    )
    assert 0.8 * wide.memory.capacity_bytes >= wide.memory.peak_bytes
    assert (
        tight.memory.peak_bytes > wide.memory.peak_bytes
        and tight.time.step_seconds < wide.time.step_seconds
    )


def test_more_layers_than_a_stage_has() -> None:
    pins = {
        **OPEN["pipeline"],
        "data": 4,
        "activation_checkpointing": PartialCheckpointing(full=17),
    }
    with pytest.raises(Refusal) as refusal:
        choose_layout(problem(pins))
    (found,) = refusal.value.diagnostics
    assert (found.code, found.key) == ("SW3135", ("parallelism", "activation_checkpointing"))
    assert "17" in found.message and "16" in found.message
    # An even share is legal, wherever the stages end: a smaller one recomputes all that it has.
    assert choose_layout(
        problem({**pins, "activation_checkpointing": PartialCheckpointing(full=16)})
    ).feasible


def test_what_explains_it() -> None:
    """A number that the search would not choose has its place all the same, and a star in the
    report."""
    pins = {**OPEN["zero-2"], "activation_checkpointing": PartialCheckpointing(full=25)}
    asked = problem(pins)
    chosen = estimate_pinned_layout(asked)
    found = explain(asked, chosen)
    everywhere = explain(problem({}), choose_layout(problem({})))
    assert found.place is not None and 1 < found.place <= found.layouts == everywhere.layouts
    (reason,) = [r for r in found.keys if r.key == "activation_checkpointing"]
    assert reason.pinned and reason.other is not None
    space = layout_space(asked, chosen)
    assert space.front == (chosen.strategy,)
    assert [p.pinned for p in space.points if p.strategy == chosen.strategy] == [True]


def test_the_report_shows_what_the_search_ranks() -> None:
    asked = problem(OPEN["zero-2"])
    points = {p.strategy: p for p in layout_space(asked, choose_layout(asked)).points}
    for estimate in search(asked).ranked:
        assert (
            points[estimate.strategy].pinned
            and points[estimate.strategy].step_seconds == estimate.time.step_seconds
        )


def test_why_not() -> None:
    asked = problem({**OPEN["zero-2"], "activation_checkpointing": "full"})
    best = choose_layout(problem(OPEN["zero-2"]))
    answer = why_not(asked, best)
    assert answer.verdict == "loses" and "computation" in answer.because
    assert why_not(problem(OPEN["zero-2"]), best).verdict == "chosen"


def test_a_plan_is_priced_as_it_stands() -> None:
    asked = problem(OPEN["pipeline"])
    best = choose_layout(asked)
    assert estimate_layout(asked, best.strategy) == best
