"""From seconds to figures: quartiles, deadlines, layers, and what the engine adds."""

from __future__ import annotations

import itertools

import pytest

from shardwright.calibrate.calibration_file import (
    FEWEST,
    MOST,
    Deadline,
    measurements,
    median_figure,
    samples,
    time_repeatedly,
)
from shardwright.calibrate.measurement_job import (
    Job,
    ProcessResult,
    Timing,
    measurement_plan,
    pick_micro_batch_sizes,
)
from shardwright.recipe.measurements import Measurements
from shardwright.search.layout_search import search
from shardwright.utils.json_values import read_record
from tests.unit.calibrate import measurement_files


def test_a_disturbed_repeat_moves_no_figure() -> None:
    quiet = median_figure([1.0, 1.01, 1.02, 1.03, 1.04])
    disturbed = median_figure([1.0, 1.01, 1.02, 1.03, 90.0])
    assert quiet.value == disturbed.value == pytest.approx(1.02) and quiet.n == 5
    assert quiet.spread == pytest.approx(0.02 / 1.02)
    assert median_figure([2.0]).spread == 0 and median_figure([2.0], scale=3).value == 6


def test_repeats_end_with_their_time_and_are_never_too_few() -> None:
    clock = itertools.count()
    runs: list[int] = []

    def run() -> list[float]:
        runs.append(1)
        return [float(len(runs)), 0.5]

    first, second = time_repeatedly(run, 10, now=lambda: float(next(clock)))
    assert FEWEST < len(first) <= 13 and first[0] == 2.0 and set(second) == {0.5}
    assert len(time_repeatedly(run, 0)[0]) == FEWEST
    assert len(time_repeatedly(run, 1e9)[0]) == MOST


def test_a_deadline_shares_out_what_is_left() -> None:
    now = [0.0]
    deadline = Deadline(10, now=lambda: now[0])
    assert deadline.share(4) == 2.5
    now[0] = 6.0
    assert deadline.share(2) == 2.0
    now[0] = 20.0
    assert deadline.left == 0


def test_the_ends_of_a_line_first() -> None:
    assert pick_micro_batch_sizes([8]) == (8,)
    assert pick_micro_batch_sizes([1, 2, 4, 8, 16]) == (1, 16, 4, 2)
    assert pick_micro_batch_sizes([4, 1, 2]) == (1, 4, 2)


def test_what_a_search_would_ask_about() -> None:
    problem = measurement_files.problem(None, 4)
    found = measurement_plan(problem, search(problem).ranked)
    assert {each.tensor for each in found.layers} == {
        e.strategy.tensor for e in search(problem).ranked
    }
    assert all(each.checkpointing[0] == "none" for each in found.layers)
    assert found.places == (1,)  # every decoder layer is the same
    assert all(p.m and p.n and p.k for p in found.products)


def test_a_job_and_what_is_told_come_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    told = ProcessResult(
        device="x",
        timed=(Timing(what="traffic", sizes={"bytes": 3}, seconds=(1.0, 2.0)),),
        skipped=("a: b",),
    )
    told.write(tmp_path, 3)
    assert ProcessResult.read(tmp_path, 3) == told
    job = Job(
        is_cpu=True,
        precision="fp32",
        threads=1,
        uses_cpu_time=True,
        seconds=3.0,
        ranks=2,
        ranks_per_node=2,
        products=(),
        attention=(2048,),
        heads=2,
        head_dim=16,
        layers=(),
        engine=(),
    )
    job.write(tmp_path)
    assert Job.read(tmp_path) == job


def timed(what: str, seconds: float, **sizes: int) -> Timing:
    return Timing(what=what, sizes=sizes, seconds=(seconds, seconds))


def test_processes_are_pooled() -> None:
    told = [
        ProcessResult(device="x", timed=(timed("traffic", s, bytes=3),), skipped=())
        for s in (1.0, 3.0)
    ]
    (row,) = samples(told)
    assert row.seconds.n == 4 and row.seconds.value == 2.0 and row.sizes == {"bytes": 3}


def found_of(rows: list[Timing]) -> Measurements:
    problem = measurement_files.problem(None)
    machine = measurement_files.measurements().machine
    found = measurements(
        problem, machine, [ProcessResult(device="x", timed=tuple(rows), skipped=())]
    )
    import dataclasses

    assert read_record(Measurements, dataclasses.asdict(found)) == found  # what a recipe would read
    return found


def test_layers_by_checkpointing() -> None:
    where = {"place": 1, "tensor": 2, "micro_batch": 4}
    rows = [
        timed(f"layer {part} {k}", s, **where)
        for k in ("none", "full")
        for part, s in (("forward", 1.0), ("backward", 2.0), ("bytes", 9.0))
    ]
    found = found_of(rows)
    assert [row.activation_checkpointing for row in found.layers] == ["none", "full"]
    assert found.layers[0].tensor == 2 and found.layers[0].kept_bytes.value == 9.0
    assert found.samples == ()


def test_what_the_engine_adds_is_taken_apart() -> None:
    """A step: 0.5 s, 2e-6 s a parameter; a micro-batch: 0.1 s, and for each layer 0.03 s beside its
    own 0.2 s."""
    short = [timed("short layer", s, place=i) for i, s in enumerate((0.05, 0.2, 0.2, 0.15))]
    steps = [
        timed(
            "engine step",
            0.5 + 2e-6 * parameters + m * (0.1 + 0.05 + 0.15 + layers * (0.2 + 0.03)),
            zero_stage=3,
            layers=layers,
            micro_batches=m,
            parameters=parameters,
        )
        for layers, parameters in ((1, 100_000), (2, 150_000))
        for m in (1, 3)
    ]
    (row,) = found_of([*short, *steps]).engine
    assert row.zero_stage == 3
    assert row.micro_batch_seconds.value == pytest.approx(0.1)
    assert row.layer_seconds.value == pytest.approx(0.03)
    assert row.step_seconds.value == pytest.approx(0.5)
    assert row.parameter_seconds.value == pytest.approx(2e-6)
    assert found_of(steps[:3]).engine == ()
