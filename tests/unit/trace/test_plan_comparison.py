"""The plan's lines against the measured ones: both add up to their step, the largest first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.layer_times import kernel_seconds, pass_times
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import stage_seconds
from shardwright.diagnostics import Refusal
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.objectives import NEXT_TOKEN, ObjectiveSection
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.search.layout_search import estimate_pinned_layout
from shardwright.trace.kernel_classes import Line
from shardwright.trace.plan_comparison import (
    compare_step,
    decoder_layers_of,
    predicted_step,
    trace_mismatches,
)
from shardwright.trace.step_trace import RankTrace, read_step_trace
from tests.unit.trace.trace_files import (
    kernel,
    nccl,
    problem_on,
    step_marks,
    write_step,
    write_trace,
)

LAYOUTS: list[dict[str, Any]] = [
    {"gpus": 1},
    {"gpus": 1, "activation_checkpointing": "full"},
    {"gpus": 1, "activation_checkpointing": "selective"},
    {"gpus": 1, "activation_checkpointing": PartialCheckpointing(full=5)},
    {"gpus": 8, "tensor": 2, "data": 4},
    {"gpus": 8, "zero_stage": 3},
    {"gpus": 8, "zero_stage": 2},
    {"gpus": 8, "pipeline": 4, "data": 2},
    {"gpus": 8, "context": 2, "data": 4},
    {"gpus": 8, "zero_stage": 3, "objective": "kto"},
    {"gpus": 8, "pipeline": 4, "data": 2, "objective": "kto"},
]


def priced(objective: str = NEXT_TOKEN, **layout: Any) -> tuple[PricedLayout, Estimate]:
    problem = problem_on(**layout)
    trains = dataclasses.replace(
        problem.recipe.training, objective=ObjectiveSection(name=objective)
    )
    recipe = dataclasses.replace(problem.recipe, training=trains)
    problem = dataclasses.replace(problem, recipe=recipe)
    pinned = estimate_pinned_layout(problem)
    return price_planned_layout(problem, pinned.strategy, pinned.boundaries)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_predicted_lines_add_up(layout: dict[str, Any], tmp_path: Path) -> None:
    plan, estimate = priced(**layout)
    for rank in range(plan.strategy.pipeline):
        kinds = kernel_seconds(plan, rank)
        assert kinds is not None and min(kinds.products, kinds.memory_bound) > 0
        assert bool(kinds.attention) == bool(decoder_layers_of(plan, rank))
        assert kinds.products + kinds.attention + kinds.memory_bound + kinds.host == pytest.approx(
            stage_seconds(plan, rank, pass_times(plan)).compute
        )
    trace = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 1.0}))
    predicted = predicted_step(plan, estimate, [trace])
    assert sum(seconds or 0.0 for seconds in predicted.lines.values()) == pytest.approx(
        estimate.time.step_seconds
    )
    moved = {line for line, size in predicted.message_bytes.items() if size}
    assert moved == {line for line in predicted.message_bytes if predicted.lines[line]}


def test_collectives_are_those_of_the_layout(tmp_path: Path) -> None:
    trace = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 1.0}))

    def lines(**layout: Any) -> set[Line]:
        predicted = predicted_step(*priced(**layout), [trace])
        return {line for line, size in predicted.message_bytes.items() if size}

    assert lines(gpus=8) == {"all_reduce"}
    assert lines(gpus=8, zero_stage=3) == {"all_gather", "reduce_scatter"}
    assert lines(gpus=8, context=2, data=4) == {"all_to_all", "all_reduce"}
    assert lines(gpus=8, pipeline=4, data=2) >= {"send_recv", "all_reduce"}


def test_the_largest_difference_first_with_advice(tmp_path: Path) -> None:
    plan, estimate = priced(gpus=1)
    probe = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 1.0}))
    lines = predicted_step(plan, estimate, [probe]).lines
    measured: dict[Line, float] = {
        line: lines[line] or 0.0
        for line in ("matrix_products", "attention", "memory_bound", "optimizer")
    }
    measured["memory_bound"] *= 3
    measured["attention"] *= 0.5
    trace = read_step_trace(write_step(tmp_path / "t.json", measured, idle=lines["idle"] or 0.0))
    found = compare_step(predicted_step(plan, estimate, [trace]), [trace])
    first, second, *rest = found.lines
    assert first.line == "memory_bound" and first.ratio == pytest.approx(3, rel=1e-4)
    assert "kernels: compile" in first.advice
    assert second.line == "attention" and second.ratio == pytest.approx(0.5, rel=1e-4)
    assert "--calibrate" in second.advice
    assert not any(line.advice for line in rest)
    assert found.measured_seconds == pytest.approx(
        found.predicted_seconds + sum(line.difference_seconds or 0.0 for line in found.lines)
    )


def test_without_an_optimizer_the_step_is_compared_without_it(tmp_path: Path) -> None:
    plan, estimate = priced(gpus=1)
    trace = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 1.0}))
    found = compare_step(predicted_step(plan, estimate, [trace]), [trace])
    (optimizer,) = (line for line in found.lines if line.line == "optimizer")
    assert optimizer.measured_seconds is None and optimizer.difference_seconds is None
    assert found.predicted_seconds == pytest.approx(
        estimate.time.step_seconds - estimate.time.optimizer_seconds
    )
    assert any("no optimizer" in note for note in found.notes)


def test_bus_bandwidth_and_bytes(tmp_path: Path) -> None:
    plan, estimate = priced(gpus=8)
    events = [
        kernel("matrix_products", 0, 10),
        nccl("all_reduce", 10, 20, 1_000_000_000, range(8)),
        *step_marks((0, 30)),
    ]
    trace = read_step_trace(write_trace(tmp_path / "t.json", events, rank=0, world=8))
    found = compare_step(predicted_step(plan, estimate, [trace]), [trace])
    (line,) = (line for line in found.lines if line.line == "all_reduce")
    assert (line.message_bytes, line.calls) == (2e9, 1)
    assert line.predicted_message_bytes == pytest.approx(4 * plan.graph.total_parameters, rel=0.01)
    assert line.bus_gbytes_per_second == pytest.approx(2 * 7 / 8 * 2e9 / 20e-3 / 1e9)


def test_an_absent_collective_is_said(tmp_path: Path) -> None:
    plan, estimate = priced(gpus=8)
    trace = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 0.3}))
    found = compare_step(predicted_step(plan, estimate, [trace]), [trace])
    (line,) = (line for line in found.lines if line.line == "all_reduce")
    assert "the trace has none" in line.advice


def told(plan: PricedLayout, *traces: RankTrace) -> list[str]:
    return [diagnostic.message for diagnostic in trace_mismatches(plan, traces)]


def test_traces_of_other_runs_are_named(tmp_path: Path) -> None:
    plan, _ = priced(gpus=8)

    def trace(name: str, *events: Any, **more: Any) -> RankTrace:
        listed = [kernel("matrix_products", 0, 1), *events]
        return read_step_trace(write_trace(tmp_path / name, listed, **more))

    calls = [kernel("attention", at, 0.5) for at in range(16)]
    assert told(plan, trace("good", *calls, rank=1, world=8)) == []
    (world,) = told(plan, trace("world", rank=0, world=16))
    assert "16 ranks" in world
    (layers,) = told(plan, trace("layers", *calls[:12]))
    assert "12 forward calls" in layers and "16 layers" in layers
    other, _ = priced(gpus=8)
    cluster = problem_on(8, gpu="h200-sxm-141gb").cluster
    other = dataclasses.replace(other, problem=dataclasses.replace(other.problem, cluster=cluster))
    (device,) = told(other, trace("device"))
    assert "NVIDIA H100" in device and "h200-sxm-141gb" in device
    with pytest.raises(Refusal, match="both of rank 1"):
        told(plan, trace("a", rank=1, world=8), trace("b", rank=1, world=8))
    cpu = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 9}
    path = write_trace(tmp_path / "cpu", [cpu])
    with pytest.raises(Refusal, match="no GPU kernel"):
        told(plan, read_step_trace(path))


def test_notes_name_unaligned_products_and_waiting_for_data(tmp_path: Path) -> None:
    plan, estimate = priced(gpus=1)
    name = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(...)"
    events = [kernel("matrix_products", 0, 9) | {"name": name}, *step_marks((0, 10))]
    trace = read_step_trace(write_trace(tmp_path / "t.json", events))
    found = compare_step(predicted_step(plan, estimate, [trace]), [trace])
    assert any("unaligned" in note and "multiple of 64" in note for note in found.notes)
