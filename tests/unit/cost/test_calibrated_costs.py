"""What measured figures do to a prediction, and that they speak of nothing else than what was
measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.cost.calibrated_costs import (
    ZERO3_FORWARD_HOOK_SHARE,
    calibrated_constants,
    measured_run_of,
)
from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layout_costs import break_down
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import Checkpointing, PartialCheckpointing
from shardwright.recipe.measurements import MeasuredMachine, Measurements
from shardwright.search.layout_resolution import estimate_layout, price_planned_layout
from tests.unit.calibrate.measurement_files import engine, figure, layer, measurements, problem, ran
from tests.unit.models.factory import SMALL_LLAMA, graph_of

LAYERS = len(graph_of(SMALL_LLAMA).layers)
HEAD = LAYERS - 1
ONE = Layout(
    tensor=1,
    pipeline=1,
    data=2,
    zero_stage=1,
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)


def estimate(found: Measurements | None, s: Layout = ONE, **changes: Any) -> Estimate:
    return estimate_layout(problem(found, s.world_size, **changes), s)


def whole_model(seconds: float = 1.0, **changes: Any) -> Measurements:
    """Every layer's forward pass takes so long for each row."""
    rows = [
        layer(p, b, seconds * b, checkpointing=k)
        for p in (0, 1, HEAD)
        for b in (1, 4)
        for k in ("none",)
    ]
    rows += [layer(1, b, seconds * b, checkpointing="full") for b in (1, 4)]
    return measurements(layers=tuple(rows), **changes)


def test_constants_stand_in_their_place() -> None:
    found = measurements(constants={"memory_efficiency": figure(0.5), "tile_seconds": figure(0.25)})
    wanted = dataclasses.replace(default_constants(), memory_efficiency=0.5, tile_seconds=0.25)
    assert calibrated_constants(problem(found).recipe) == wanted
    assert calibrated_constants(problem(None).recipe) == default_constants()
    assert estimate(found).time.step_seconds != estimate(None).time.step_seconds


def test_layers_take_what_they_were_measured_to_take() -> None:
    """Two rows of a micro-batch lie between the one and the four that were measured."""
    time = estimate(whole_model()).time
    passes = 3 * LAYERS * ONE.micro_batch_size * ONE.gradient_accumulation_steps
    assert time.compute_seconds == pytest.approx(passes, rel=0.01)
    again = estimate(whole_model(), dataclasses.replace(ONE, activation_checkpointing="full")).time
    decoders = LAYERS - 2
    more = decoders * ONE.micro_batch_size * ONE.gradient_accumulation_steps
    assert again.compute_seconds == pytest.approx(passes + more, rel=0.01)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "of another one"},
        {"sequence_length": 64},
        {"target": "reference"},
    ],
)
def test_of_another_model_they_say_nothing(other: dict[str, Any]) -> None:
    bare = measurements()
    assert (
        estimate(whole_model(**other)).time == estimate(bare).time != estimate(whole_model()).time
    )


def test_a_tensor_degree_that_was_not_measured_has_the_formulas() -> None:
    cut = dataclasses.replace(ONE, tensor=2, data=1, gradient_accumulation_steps=8)
    assert estimate(whole_model(), cut).time == estimate(measurements(), cut).time


def test_the_bytes_that_a_layer_keeps() -> None:
    plain, found = estimate(measurements()).memory, estimate(whole_model()).memory
    # 1000 bytes a row and decoder layer; the embedding's are the traced ones.
    decoders = (LAYERS - 2) * 1000 * ONE.micro_batch_size
    assert found.stages[0].activations_bytes < plain.stages[0].activations_bytes
    assert found.stages[0].activations_bytes >= decoders


def test_the_engine_adds_its_own() -> None:
    found = measurements(engine=(engine(1, micro_batch=0.5, layer=0.25, step=7.0),))
    with_it, without = estimate(found).time, estimate(measurements()).time
    decoders, m = LAYERS - 2, ONE.gradient_accumulation_steps
    assert with_it.compute_seconds - without.compute_seconds == pytest.approx(
        m * (0.5 + decoders * 0.25)
    )
    assert with_it.optimizer_seconds == pytest.approx(7.0)
    other = dataclasses.replace(ONE, zero_stage=2)
    assert estimate(found, other).time == estimate(measurements(), other).time


def test_a_repeated_forward_pass_has_the_hooks_of_zero_3_again() -> None:
    """Without ZeRO-3 no module is fetched."""
    for stage, again in ((2, 0.0), (3, ZERO3_FORWARD_HOOK_SHARE)):
        plain, hooked = (
            measurements(engine=(engine(stage),)),
            measurements(engine=(engine(stage, layer=0.25),)),
        )
        choices: list[tuple[Checkpointing | PartialCheckpointing, int]] = [
            ("none", 0),
            (PartialCheckpointing(full=1), 1),
            ("full", LAYERS - 2),
        ]
        for choice, repeated in choices:
            s = dataclasses.replace(ONE, zero_stage=stage, activation_checkpointing=choice)
            more = estimate(hooked, s).time.step_seconds - estimate(plain, s).time.step_seconds
            layers = LAYERS - 2 + again * repeated
            assert more == pytest.approx(0.25 * layers * ONE.gradient_accumulation_steps)


def test_a_layout_that_ran_takes_what_it_took() -> None:
    alone = estimate(measurements()).time.step_seconds
    found = measurements(runs=(ran(ONE.pins(), 3 * alone, alone), ran({"tensor": 9}, 5.0, 1.0)))
    assert estimate(found).time.step_seconds == pytest.approx(3 * alone)
    other = dataclasses.replace(ONE, micro_batch_size=1, gradient_accumulation_steps=8)
    scale_time, plain = estimate(found, other).time, estimate(measurements(), other).time
    assert scale_time.step_seconds == pytest.approx(4 * plain.step_seconds)  # the median of 3 and 5
    assert scale_time.mfu == pytest.approx(plain.mfu / 4)
    assert measured_run_of(problem(found).recipe, problem(found).graph, other) is None


def parts_add_up(given: Problem, s: Layout) -> Estimate:
    found = estimate_layout(given, s)
    layout, found = price_planned_layout(given, s, found.boundaries)
    t = found.time
    parts = (t.compute_seconds, t.tensor_comm_seconds, t.pipeline_comm_seconds, t.data_comm_seconds)
    assert sum(parts) + t.optimizer_seconds + t.bubble_seconds == pytest.approx(
        t.step_seconds, rel=1e-6
    )
    step = break_down(layout, found).step
    assert step.total_seconds == pytest.approx(t.step_seconds, rel=1e-6)
    assert min(dataclasses.astuple(step)) >= 0
    return found


def machine(cores: int) -> MeasuredMachine:
    return dataclasses.replace(measurements().machine, cores=cores)


def test_ranks_that_share_cores_take_no_less_than_all_their_work() -> None:
    """Four stages on two cores: while one rank waits for its neighbour, another has its core."""
    s = dataclasses.replace(ONE, pipeline=4, data=1, gradient_accumulation_steps=8)
    alone = parts_add_up(problem(whole_model(machine=machine(4)), 4), s).time
    shared = parts_add_up(problem(whole_model(machine=machine(2)), 4), s).time
    one_core = parts_add_up(problem(whole_model(machine=machine(1)), 4), s).time
    work = 3 * LAYERS * s.micro_batch_size * s.gradient_accumulation_steps
    assert alone.bubble_fraction > 0.2
    assert (
        max(alone.step_seconds, work / 2)
        <= shared.step_seconds
        <= 1.1 * max(alone.step_seconds, work / 2)
    )
    assert one_core.step_seconds == pytest.approx(work, rel=0.05)


def test_the_parts_of_a_scaled_step_add_up_too() -> None:
    s = dataclasses.replace(ONE, pipeline=2, data=1, gradient_accumulation_steps=8)
    found = whole_model(runs=(ran(s.pins(), 6.0, 4.0),))
    parts_add_up(problem(found), s)
