"""The cost model against published runs. `make bench-cost` prints the whole table, each project
left out of the fit."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shardwright.cost.cost_constants import Constants, constant_entries, default_constants
from shardwright.utils.numeric_difference import max_series_diff
from tools.fit_cost import score
from tools.fit_cost.bench_cost import off, scored
from tools.fit_cost.least_squares_fit import fit, priors, step_seconds
from tools.fit_cost.published_runs import (
    ENGINE_ROWS,
    HARDWARE,
    ROWS,
    Case,
    Row,
    case_of,
    estimate,
    hardware_of,
    in_gigabytes,
    load_cases,
)


def test_every_constant_says_what_it_is() -> None:
    entries = constant_entries()
    assert list(entries) == [field.name for field in dataclasses.fields(Constants)]
    for name, entry in entries.items():
        assert entry["meaning"] and entry["source"] and entry["unit"], name
        assert entry["value"] > 0 and entry["prior"] > 0, name
        # What is not fitted stands at its prior; the headroom is measured.
        assert (
            entry["prior_spread"] > 0
            or entry["value"] == entry["prior"]
            or name == "memory_headroom"
        ), name


def test_no_constant_sits_far_off_its_prior() -> None:
    """Two spreads of the logarithm: further, and a constant stands for something else than what it
    says."""
    for name, entry in constant_entries().items():
        if entry["prior_spread"] > 0:
            assert abs(math.log(entry["value"] / entry["prior"])) <= 2 * entry["prior_spread"], name


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    """Every ninth row: all projects but torchtitan, which has two."""
    return [case_of(row) for row in [row for row in score.rows(ROWS) if score.usable(row)][::9]]


@pytest.mark.prove
def test_a_sample_of_the_rows(sample: list[Case]) -> None:
    found = scored(sample, default_constants())
    assert found["time_rows"] >= 20 and found["memory_rows"] >= 6
    assert found["time"] <= 0.08 and found["memory"] <= 0.10
    assert found["fits_right"][0] >= 0.9 * found["fits_right"][1]


@pytest.mark.prove
def test_the_fit_finds_constants_again(sample: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times replaced by the model's own at other constants: the fit moves from the priors
    to those."""
    truth = dataclasses.replace(
        priors(), gemm_efficiency=0.7, memory_efficiency=0.65, fused_attention_efficiency=0.85
    )
    seconds = {case.row["id"]: estimate(case, truth).time.step_seconds for case in sample}
    monkeypatch.setattr(
        "tools.fit_cost.least_squares_fit.time_target", lambda case: seconds[case.row["id"]]
    )
    found = fit(sample, priors())

    def error(c: Constants) -> float:
        return max_series_diff(
            [estimate(case, c).time.step_seconds for case in sample],
            [seconds[case.row["id"]] for case in sample],
            relative=True,
        )

    assert error(found) < 0.04 < 0.1 < error(priors())
    assert found.gemm_efficiency == pytest.approx(0.7, rel=0.05)


def activations_of_the_paper(row: Row) -> float:
    """Bytes on the first stage without recomputation or sequence parallelism: arXiv 2205.05198,
    equations 2 and, for interleaved stages, the factor of section 4.2.3."""
    m, p = row["model"], row["parallel"]
    s, b, h, t, stages, interleaved = (
        m["seq_len"],
        p["micro_batch"],
        m["hidden"],
        p["tp"],
        p["pp"],
        p["virtual_stages"],
    )
    each = s * b * h * (10 + 24 / t + 5 * m["heads"] * s / (h * t))
    flights = 1 + (stages - 1) / (stages * interleaved) if interleaved > 1 else 1
    return float(each * m["layers"] * flights)


def test_memory_that_a_source_tells_in_gib_is_compared_in_gigabytes() -> None:
    rows = [
        row
        for row in score.rows(ROWS)
        if row["id"].startswith("korth-mem") and row["id"].endswith("-none")
    ]
    assert len(rows) == 4
    for row in rows:
        told = float(row["notes"].partition("act=")[2].partition(";")[0])
        assert told == pytest.approx(activations_of_the_paper(row) / 2**30, rel=1e-6), (
            "the unit of the row is GiB"
        )
        held = row["measured"]["peak_mem_GB"]
        assert in_gigabytes(row)["measured"]["peak_mem_GB"] * 1e9 == pytest.approx(held * 2**30)
    (other,) = [row for row in score.rows(ROWS) if row["id"] == "titan-8b-8-eager-bf16"]
    assert in_gigabytes(other) is other, "the collector has converted it"


@pytest.mark.prove
def test_the_fit_prices_experts_as_the_estimate_does() -> None:
    """Apply the hooks of transformers 4 too: they decide how the layout is resolved."""
    rows = [row for row in score.rows(ENGINE_ROWS) if row["family"] == "mixtral-moe"]
    case, c = case_of(rows[0]), default_constants()
    assert step_seconds(case, c) == pytest.approx(estimate(case, c).time.step_seconds)
    assert case.constants(c).hook_seconds > c.hook_seconds


def test_nanotron_tells_what_its_first_rank_allocated() -> None:
    """Without tensor ranks and pipeline, where nothing of the run is guessed."""
    rows = [
        row
        for row in score.rows(ENGINE_ROWS)
        if row["engine"] == "nanotron" and row["parallel"]["zero_stage"] == 0
    ]
    plain = [row for row in rows if row["parallel"]["tp"] == row["parallel"]["pp"] == 1]
    assert len(plain) == 6
    for row in plain:
        error = off(case_of(row), default_constants()).memory
        assert error is not None and abs(error) < 0.02, row["id"]


@pytest.mark.prove
def test_all_rows() -> None:
    """What README says of the cost model."""
    cases = load_cases()
    found = scored(cases, default_constants())
    assert found["time"] <= 0.05 and found["memory"] <= 0.07
    assert found["oom_right"][0] == found["oom_right"][1]
    assert found["fits_right"][0] >= 0.95 * found["fits_right"][1]
    assert found["regret"] <= 0.015
    for project in dict.fromkeys(case.project for case in cases):
        within = scored([case for case in cases if case.project == project], default_constants())
        assert within["time"] <= 0.10 and (within["memory"] or 0) <= 0.08, project


@pytest.mark.prove
@pytest.mark.parametrize("hardware", HARDWARE)
def test_hardware_left_out(hardware: str) -> None:
    """Nothing is fitted to one generation of GPUs: the others' rows predict its steps."""
    cases = load_cases()
    c = fit([case for case in cases if hardware_of(case) != hardware], priors())
    assert scored([case for case in cases if hardware_of(case) == hardware], c)["time"] <= 0.10
