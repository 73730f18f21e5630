"""The file that a trace writes: the plan's lines become the measured ones, and its step is that of
the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layout_costs import price
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.diagnostics import Refusal
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.measurements import MeasuredValue, Measurements, MeasurementsFile
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.search.layout_search import estimate_pinned_layout
from shardwright.trace.kernel_classes import COMPUTE_LINES, Line
from shardwright.trace.plan_comparison import compare_step, predicted_step
from shardwright.trace.rank_comparison import expected_seconds
from shardwright.trace.step_trace import RankTrace, read_step_trace
from shardwright.trace.trace_calibration import TraceCalibration, calibrate_from_trace
from shardwright.utils.json_values import read_record, strict_json
from tests.unit.trace.trace_files import (
    kernel,
    nccl,
    problem_on,
    step_marks,
    with_measured,
    write_step,
    write_trace,
)

TRUE = {
    "memory_efficiency": 0.5,
    "gemm_efficiency": 0.62,
    "fused_attention_efficiency": 0.45,
    "optimizer_traffic_bytes": 60.0,
    "micro_batch_seconds": 0.009,
}
"""The constants of the GPU that the tests pretend to trace."""


def priced(problem: Problem) -> tuple[PricedLayout, Estimate]:
    pinned = estimate_pinned_layout(problem)
    return price_planned_layout(problem, pinned.strategy, pinned.boundaries)


def on_the_true_gpu(plan: PricedLayout, estimate: Estimate, path: Path) -> dict[Line, float | None]:
    c = default_constants()
    constants = dataclasses.replace(c, **TRUE)
    layout = with_boundaries(
        build_priced_layout(plan.problem, plan.strategy, constants), plan.boundaries
    )
    real = price(layout, estimate.memory, ())
    probe = read_step_trace(write_step(path, {"matrix_products": 1.0}))
    return dict(predicted_step(layout, real, [probe]).lines)


def measured(problem: Problem, tmp_path: Path, *, optimizer: bool = True) -> RankTrace:
    plan, estimate = priced(problem)
    lines = on_the_true_gpu(plan, estimate, tmp_path / "probe.json")
    names = [line for line in COMPUTE_LINES if lines[line] and (optimizer or line != "optimizer")]
    seconds = {line: lines[line] or 0.0 for line in names}
    return read_step_trace(write_step(tmp_path / "t.json", seconds, idle=lines["idle"] or 0.0))


def calibrated(problem: Problem, *traces: RankTrace) -> TraceCalibration:
    plan, estimate = priced(problem)
    return calibrate_from_trace(problem, plan, predicted_step(plan, estimate, traces), traces, None)


def with_file(problem: Problem, found: Measurements) -> Problem:
    """Return the problem as a recipe that names the file has it."""
    again = read_record(Measurements, json.loads(strict_json(found)))
    assert again == found
    return with_measured(
        problem,
        MeasurementsFile(path="m.json", sha256=strict_json(found), content=b"", found=found),
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_constants_come_back(checkpointing: str, tmp_path: Path) -> None:
    problem = problem_on(1, activation_checkpointing=checkpointing)
    trace = measured(problem, tmp_path)
    found = calibrated(problem, trace)
    constants = {name: figure.value for name, figure in found.measurements.constants.items()}
    for name, value in TRUE.items():
        assert constants[name] == pytest.approx(value, rel=0.03), name
    assert found.skipped == ()
    corrected = with_file(problem, found.measurements)
    plan, estimate = priced(corrected)
    assert estimate.time.step_seconds == pytest.approx(trace.step_seconds, rel=1e-6)
    assert found.step_after == pytest.approx(trace.step_seconds)
    lines = compare_step(predicted_step(plan, estimate, [trace]), [trace]).lines
    assert all(line.ratio == pytest.approx(1, rel=0.04) for line in lines if line.predicted_seconds)


def test_another_layout_is_planned_with_them(tmp_path: Path) -> None:
    problem = problem_on(1)
    found = calibrated(problem, measured(problem, tmp_path))
    other = problem_on(1, activation_checkpointing="full")
    real, estimate = priced(other)
    lines = on_the_true_gpu(real, estimate, tmp_path / "probe.json")
    expected = sum(seconds or 0.0 for seconds in lines.values())
    _, corrected = priced(with_file(other, found.measurements))
    assert corrected.time.step_seconds == pytest.approx(expected, rel=0.02)
    assert abs(estimate.time.step_seconds / expected - 1) > 0.2


def test_without_an_optimizer_its_seconds_stay(tmp_path: Path) -> None:
    problem = problem_on(1)
    found = calibrated(problem, measured(problem, tmp_path, optimizer=False))
    assert found.measurements.runs == ()
    assert any("no optimizer step" in text for text in found.skipped)
    _, before = priced(problem)
    _, after = priced(with_file(problem, found.measurements))
    assert after.time.optimizer_seconds == pytest.approx(before.time.optimizer_seconds, rel=0.03)
    assert after.time.step_seconds > 1.1 * before.time.step_seconds


def ranks_with_collectives(
    problem: Problem, tmp_path: Path, slowdown: float, hidden: float = 0.0
) -> list[RankTrace]:
    plan, _ = priced(problem)
    traces = []
    for rank in range(plan.strategy.world_size):
        call = nccl("all_reduce", 0, 1, 100_000_000, range(plan.strategy.world_size))
        sample = read_step_trace(write_trace(tmp_path / "one", [call, kernel("attention", 2, 1)]))
        seconds = expected_seconds(plan, sample.collectives[0])
        assert seconds is not None
        took = seconds * slowdown * 1e3
        call["ts"], call["dur"] = 5e6 + (50 - hidden * took) * 1e3, took * 1e3
        events = [kernel("matrix_products", 0, 50), call, kernel("optimizer", 90, 5)]
        path = write_trace(
            tmp_path / f"{rank}.json", [*events, *step_marks((0, 100))], rank=rank, world=4
        )
        traces.append(read_step_trace(path))
    return traces


def test_links_and_overlap(tmp_path: Path) -> None:
    problem = problem_on(4)
    traces = ranks_with_collectives(problem, tmp_path, slowdown=2.0, hidden=0.4)
    constants = calibrated(problem, *traces).measurements.constants
    default = default_constants().intra_node_efficiency
    assert constants["intra_node_efficiency"].value == pytest.approx(default / 2, rel=0.02)
    assert constants["overlap_deepspeed"].value == pytest.approx(0.4, rel=0.02)


def test_one_rank_tells_nothing_of_links(tmp_path: Path) -> None:
    problem = problem_on(4)
    found = calibrated(problem, ranks_with_collectives(problem, tmp_path, 2.0)[0])
    assert "intra_node_efficiency" not in found.measurements.constants
    assert any(text.startswith("links") for text in found.skipped)


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    problem = problem_on(1)
    first = calibrated(problem, measured(problem, tmp_path)).measurements
    earlier = dataclasses.replace(
        first,
        constants={"tile_seconds": MeasuredValue(value=2e-6, n=9, spread=0.1)},
        runs=tuple(
            dataclasses.replace(run, pins={**dict(run.pins), "micro_batch_size": 99})
            for run in first.runs
        ),
    )
    again = calibrated(with_file(problem, earlier), measured(problem, tmp_path)).measurements
    assert again.constants["tile_seconds"] == earlier.constants["tile_seconds"]
    assert set(first.constants) <= set(again.constants)
    assert [run.pins["micro_batch_size"] for run in again.runs] == [99, 1]


def test_a_trace_that_corrects_nothing_is_refused(tmp_path: Path) -> None:
    problem = problem_on(1)
    problem = dataclasses.replace(
        problem,
        recipe=dataclasses.replace(
            problem.recipe, assume=dataclasses.replace(problem.recipe.assume, mfu=0.4)
        ),
    )
    trace = read_step_trace(write_step(tmp_path / "t.json", {"matrix_products": 0.2}))
    with pytest.raises(Refusal) as refused:
        calibrated(problem, trace)
    assert refused.value.diagnostics[0].code == "SW3317"


def test_what_no_constant_reaches_is_said(tmp_path: Path) -> None:
    problem = problem_on(1)
    lines: dict[Line, Any] = {"memory_bound": 0.02, "matrix_products": 1e-4, "attention": 0.01}
    found = calibrated(problem, read_step_trace(write_step(tmp_path / "t.json", lines)))
    assert "gemm_efficiency" not in found.measurements.constants
    assert any("matrix products" in text and "gemm_efficiency" in text for text in found.skipped)
