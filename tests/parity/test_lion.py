"""Lion trains as a plain Lion of one process does, under every ZeRO stage and kind of rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import Proved, launched
from tests.parity.harness import Case
from tests.parity.plain_optimizers import assert_as_one_process

lion = partial(Case, optimizer="lion")
TWO: dict[str, Case] = {
    "llama-zero0": lion(model="llama", data=2, zero_stage=0),
    "llama-zero1": lion(model="llama", data=2),
    "llama-zero2": lion(model="llama", data=2, zero_stage=2),
    "llama-tied-zero3": lion(model="llama-tied", data=2, zero_stage=3),
    "llama-tied-pp2": lion(model="llama-tied", pipeline=2),
    "llama-tp2": lion(model="llama", tensor=2),
    "llama-context2": lion(model="llama", context=2),
    "qwen3-moe-expert2": lion(model="qwen3_moe-wide", data=2, expert=2),
    "resumed-llama-tied-pp2": lion(model="llama-tied", pipeline=2),
    "resumed-llama-tp2": lion(model="llama", tensor=2),
    "resumed-llama-zero3": lion(model="llama", data=2, zero_stage=3),
}


@pytest.mark.prove
@pytest.mark.launch
def test_lion_trains_as_one_process(tmp_path: Path, proved: Proved) -> None:
    found = launched(TWO, tmp_path, "optimizer_worker.py")
    for name, figures in found.items():
        proved("optimizers", f"lion {name}", figures)
    assert_as_one_process(found)
    assert largest_difference(line["undecided"] for line in found.values()) < 1e-3, found
    assert all(line["state bytes"] > 100_000 for line in found.values())
    # Dummies that even out the groups of pipeline stages are not counted.
    assert all(
        line["state bytes off"] <= (72 if TWO[name].pipeline > 1 else 0)
        for name, line in found.items()
        if TWO[name].tensor == 1
    ), found
