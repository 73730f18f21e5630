"""Memory and time between `none` and `full`: the first layers of each stage keep their inputs
alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shardwright.cost.layout_costs import break_down
from shardwright.cost.peak_memory import RankMemoryModel, estimate_memory
from shardwright.cost.priced_layout import PricedLayout
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.search.layout_resolution import estimate_layout, with_stages_assigned
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

LAYERS, LENGTH = 32, 4096
PIPELINE = {"pipeline": 4, "data": 2, "gradient_accumulation_steps": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 4, "data": 2},
    "zero-3": {"zero_stage": 3},
    "1f1b": PIPELINE,
    "dualpipev": {**PIPELINE, "schedule": "dualpipev"},
}


def layout_of(layout: dict[str, Any], choice: object, **more: Any) -> PricedLayout:
    batch = change(**layout).data * change(**layout).gradient_accumulation_steps
    recipe = recipe_of(
        LLAMA_8B,
        training={"sequence_length": LENGTH, "global_batch_size": batch},
        assume={"ignore_memory": True},  # the stages are cut by time alone
        **more,
    )
    return with_stages_assigned(
        problem_of(recipe, graph_of(LLAMA_8B)), change(**layout, activation_checkpointing=choice)
    )


def step(layout: PricedLayout) -> float:
    return estimate_layout(layout.problem, layout.strategy).time.step_seconds


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layers_of_a_stage_are_full(name: str) -> None:
    some, full = (
        layout_of(LAYOUTS[name], PartialCheckpointing(full=LAYERS)),
        layout_of(LAYOUTS[name], "full"),
    )
    ours, theirs = estimate_memory(some), estimate_memory(full)
    if some.boundaries == full.boundaries:
        assert ours == theirs
    if name in ("one", "tensor", "zero-3"):
        priced, plain = (estimate_layout(x.problem, x.strategy) for x in (some, full))
        assert priced.time.step_seconds == pytest.approx(plain.time.step_seconds, rel=1e-12)
        assert priced.time.hardware_tflops_per_gpu == pytest.approx(
            plain.time.hardware_tflops_per_gpu, rel=1e-12
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layer_more_takes_time_and_frees_memory(name: str) -> None:
    stages = change(**LAYOUTS[name]).stages
    most = LAYERS // stages - 1
    layouts = [
        layout_of(LAYOUTS[name], PartialCheckpointing(full=n) if n else "none") for n in range(most)
    ]
    assert len(layouts) > 1
    for fewer, more in itertools.pairwise(layouts):
        assert step(fewer) < step(more)
        kept = [sum(s.activations_bytes for s in estimate_memory(x).stages) for x in (fewer, more)]
        assert kept[0] > kept[1]
    assert step(layouts[-1]) < step(layout_of(LAYOUTS[name], "full"))


def test_what_a_stage_keeps() -> None:
    """Of 32 layers the inputs of 12 and everything of 20, for each micro-batch."""
    none, full, partial = (
        RankMemoryModel(layout_of({}, x)) for x in ("none", "full", PartialCheckpointing(full=12))
    )
    ends = none.saved_activation_bytes(0, 1)
    some, every = full.saved_activation_bytes(2, 3), none.saved_activation_bytes(2, 3)
    assert 0 < some < every
    assert partial.saved_activation_bytes(0, LAYERS + 2) == pytest.approx(
        ends + 12 * some + 20 * every
    )


def test_what_is_made_again_has_the_room_of_what_went_before() -> None:
    """Recomputing all but one layer takes no more than recomputing all, where a layer takes more
    than the loss."""
    almost, full = (
        sum((m.activations_bytes, m.workspace_bytes))
        for choice in (PartialCheckpointing(full=LAYERS - 1), "full")
        for m in estimate_memory(
            layout_of({"micro_batch_size": 16, "loss": "chunked"}, choice)
        ).stages
    )
    assert almost == pytest.approx(full, rel=0.02)


def test_the_parts_say_what_is_run_again() -> None:
    layouts = [
        layout_of({"tensor": 4, "data": 2}, choice)
        for choice in ("none", PartialCheckpointing(full=8), "full")
    ]
    steps = [break_down(x, estimate_layout(x.problem, x.strategy)).step for x in layouts]
    again = [s.recompute_seconds for s in steps]
    assert again[0] == 0 and again[1] == pytest.approx(again[2] * 8 / LAYERS)
    comm = [s.tensor_backward_seconds for s in steps]
    assert (
        comm[1] - comm[0] == pytest.approx((comm[2] - comm[0]) * 8 / LAYERS) and comm[2] > comm[0]
    )
    assert steps[0].backward_seconds == pytest.approx(steps[1].backward_seconds)


def test_megatron_counts_its_layers_likewise() -> None:
    flops = []
    for choice in ("none", PartialCheckpointing(full=4), "full"):
        layout = layout_of(PIPELINE, choice, target="megatron")
        time = estimate_layout(layout.problem, layout.strategy).time
        flops.append(time.hardware_tflops_per_gpu / time.model_tflops_per_gpu)
    # Four stages of eight layers each.
    assert flops[1] - flops[0] == pytest.approx((flops[2] - flops[0]) / 2)
