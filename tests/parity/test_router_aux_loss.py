"""The balance loss of a mixture's routers is the same under every layout, and that of one plain
process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import difference, largest_difference
from tests.parity.case_launches import launched, sample_of
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    Case,
    compare,
    reference,
    write_inputs,
)

COEFFICIENT = 0.5  # large enough to move the norm by percents

TWO: dict[str, Case] = {
    "zero1": Case(model="mixtral", data=2, balance=COEFFICIENT),
    "zero3-experts-full": Case(
        model="qwen3_moe", data=2, expert=2, zero_stage=3, checkpointing="full", balance=COEFFICIENT
    ),
    "sigmoid": Case(model="deepseek_v3", data=2, expert=2, zero_stage=2, balance=COEFFICIENT),
    "context": Case(
        model="mixtral", context=2, loss="chunked", checkpointing="full", balance=COEFFICIENT
    ),
    "pipeline": Case(model="mixtral", pipeline=2, micro=1, accumulation=4, balance=COEFFICIENT),
    "tensor": Case(model="mixtral", tensor=2, balance=COEFFICIENT),
}
FOUR: dict[str, Case] = {
    "dense-first-pp2": Case(model="dense-first", data=2, expert=2, pipeline=2, balance=COEFFICIENT),
    "context-tp2": Case(model="mixtral", tensor=2, context=2, expert=2, balance=COEFFICIENT),
    "dualpipev": Case(
        model="mixtral-deep",
        context=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        balance=COEFFICIENT,
    ),
}


PADDED_TWO: dict[str, Case] = {
    "experts": Case(model="mixtral", data=2, expert=2, zero_stage=2, balance=COEFFICIENT),
    "zero3-full": Case(
        model="qwen3_moe", data=2, zero_stage=3, checkpointing="full", balance=COEFFICIENT
    ),
    "context-chunked-full": Case(
        model="mixtral", context=2, loss="chunked", checkpointing="full", balance=COEFFICIENT
    ),
    "pipeline-full": Case(
        model="mixtral",
        pipeline=2,
        micro=1,
        accumulation=4,
        checkpointing="full",
        balance=COEFFICIENT,
    ),
    "tensor-packed": Case(model="deepseek_v3", tensor=2, zero_stage=2, balance=COEFFICIENT),
    "context-packed": Case(model="mixtral", context=2, balance=COEFFICIENT),
    "pipeline-packed": Case(
        model="mixtral", pipeline=2, accumulation=3, checkpointing={"full": 1}, balance=COEFFICIENT
    ),
}
"""Those that end in "packed" have several conversations in a row."""
PADDED_FOUR: dict[str, Case] = {
    "dense-first-full": Case(
        model="dense-first", data=2, expert=2, pipeline=2, checkpointing="full", balance=COEFFICIENT
    ),
    "dualpipev-full": Case(
        model="mixtral-deep",
        context=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=5,
        micro=1,
        checkpointing="full",
        balance=COEFFICIENT,
    ),
}


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(sample_of(PADDED_TWO, "experts", "zero3-full"), id="sample"),
        pytest.param(PADDED_TWO, id="two-ranks", marks=pytest.mark.prove),
        pytest.param(PADDED_FOUR, id="four-ranks", marks=pytest.mark.prove),
    ],
)
def test_padding_is_no_part_of_a_sequence(cases: dict[str, Case], tmp_path: Path) -> None:
    found = launched(cases, tmp_path, "padded_worker.py")
    assert largest_difference(line["loss"] for line in found.values()) <= LOSS_ABSOLUTE, found
    assert largest_difference(line["norm"] for line in found.values()) <= NORM_RELATIVE, found


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two-ranks", "four-ranks"])
def test_it_trains_as_one_process(cases: dict[str, Case], tmp_path: Path) -> None:
    found = launched(cases, tmp_path)
    assert largest_difference(line["loss"] for line in found.values()) <= LOSS_ABSOLUTE, found
    assert largest_difference(line["norm"] for line in found.values()) <= NORM_RELATIVE, found


def test_it_is_a_part_of_the_gradient(tmp_path: Path) -> None:
    """The compared gradients differ without it."""
    case = Case(model="mixtral", balance=COEFFICIENT)
    tokens = write_inputs(case, tmp_path)
    with_it, without = (
        reference(each, tokens).grad_norms for each in (case, replace(case, balance=0.0))
    )
    assert difference(with_it[0], without[0]) > 1000 * NORM_RELATIVE


@pytest.mark.prove
@pytest.mark.launch
def test_under_the_reference_engine(tmp_path: Path) -> None:
    compare(Case(model="mixtral", target="reference", zero_stage=0, balance=COEFFICIENT), tmp_path)
