"""Experts shared out over ranks train as the plain process does, under every engine of DeepSpeed's,
many layouts in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import launched
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, Case, compare

TWO: dict[str, Case] = {
    "mixtral-zero1": Case(model="mixtral", data=2, expert=2),
    "mixtral-zero2": Case(model="mixtral", data=2, expert=2, zero_stage=2),
    "qwen3-moe-zero3-full": Case(
        model="qwen3_moe", data=2, expert=2, zero_stage=3, checkpointing="full"
    ),
    "mixtral-context-chunked": Case(model="mixtral", context=2, expert=2, loss="chunked"),
    "mixtral-offload": Case(model="mixtral", data=2, expert=2, zero_stage=2, offload="optimizer"),
}
FOUR: dict[str, Case] = {
    "mixtral-pp2": Case(model="mixtral", data=2, expert=2, pipeline=2),
    "dense-first-pp2": Case(model="dense-first", data=2, expert=2, pipeline=2),
    "mixtral-tp2": Case(model="mixtral", data=2, expert=2, tensor=2),
    "qwen3-moe-tp2-zero3": Case(model="qwen3_moe", data=2, expert=2, tensor=2, zero_stage=3),
    "mixtral-4-of-2": Case(model="mixtral", data=4, expert=2),
    "mixtral-4-zero3": Case(model="mixtral", data=4, expert=4, zero_stage=3),
    "mixtral-dualpipev": Case(
        model="mixtral-deep", data=2, expert=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
}
BF16: dict[str, Case] = {
    "mixtral-tp2": Case(model="mixtral", data=2, expert=2, tensor=2, precision="bf16"),
    "dense-first-pp2": Case(model="dense-first", data=2, expert=2, pipeline=2, precision="bf16"),
}


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases", [TWO, pytest.param(FOUR, marks=pytest.mark.prove)], ids=["two-ranks", "four-ranks"]
)
def test_expert_ranks_train_as_one_process(cases: dict[str, Case], tmp_path: Path) -> None:
    found = launched(cases, tmp_path)
    assert largest_difference(line["loss"] for line in found.values()) <= LOSS_ABSOLUTE, found
    assert largest_difference(line["norm"] for line in found.values()) <= NORM_RELATIVE, found


@pytest.mark.prove
@pytest.mark.launch
def test_half_precision_trains_as_one_process_in_it(tmp_path: Path) -> None:
    found = launched(BF16, tmp_path)
    assert largest_difference(line["loss"] for line in found.values()) <= BF16_RELATIVE, found
    assert largest_difference(line["norm"] for line in found.values()) <= BF16_RELATIVE, found


@pytest.mark.prove
@pytest.mark.launch
def test_compiled_run_and_exported(tmp_path: Path) -> None:
    """Every rank holds what the plan says, and the exported weights are those of one process."""
    compare(Case(model="mixtral", data=2, expert=2), tmp_path)
