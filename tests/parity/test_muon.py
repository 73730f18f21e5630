"""Muon trains as a plain Muon of one process does, under every ZeRO stage and kind of rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import Proved, launched
from tests.parity.harness import BF16_RELATIVE, Case
from tests.parity.plain_optimizers import assert_as_one_process

muon = partial(Case, optimizer="muon")

TWO: dict[str, Case] = {
    "llama-zero0": muon(model="llama", data=2, zero_stage=0),
    "llama-zero1": muon(model="llama", data=2),
    "gpt2-zero2": muon(model="gpt2-wide", data=2, zero_stage=2),
    "llama-tied-zero3": muon(model="llama-tied", data=2, zero_stage=3),
    "gpt2-pp2": muon(model="gpt2-wide", pipeline=2),
    "llama-tied-pp2": muon(model="llama-tied", pipeline=2),
    "qwen3-moe-zero2": muon(model="qwen3_moe-wide", data=2, zero_stage=2),
    "qwen3-moe-expert2": muon(model="qwen3_moe-wide", data=2, expert=2),
    "llama-context2": muon(model="llama", context=2),
    "llama-tp2": muon(model="llama", tensor=2),
    "gpt2-tp2-zero0": muon(model="gpt2-wide", tensor=2, zero_stage=0),
    "gpt-neox-zero1": muon(model="gpt_neox-wide", data=2),
    "gpt-neox-tp2": muon(model="gpt_neox-wide", tensor=2),
    "phi3-zero3": muon(model="phi3", data=2, zero_stage=3),
    "bloom-pp2": muon(model="bloom-wide", pipeline=2),
    "gpt-oss-expert2": muon(model="gpt_oss-wide", data=2, expert=2),
    "gpt-oss-tp2": muon(model="gpt_oss-wide", tensor=2),
    "resumed-llama-tied-pp2": muon(model="llama-tied", pipeline=2),
    "resumed-gpt2-tp2": muon(model="gpt2-wide", tensor=2),
    "resumed-qwen3-moe-zero3": muon(model="qwen3_moe-wide", data=2, zero_stage=3),
}
FOUR: dict[str, Case] = {
    "llama-tied-tp2-zero3": muon(model="llama-tied", tensor=2, data=2, zero_stage=3),
    "gpt2-tp2-pp2": muon(model="gpt2-wide", tensor=2, pipeline=2),
    "llama-tp4": muon(model="llama", tensor=4),
    "qwen3-moe-expert2-pp2": muon(model="qwen3_moe-wide", data=2, expert=2, pipeline=2),
    "qwen3-moe-expert2-tp2": muon(model="qwen3_moe-wide", data=2, expert=2, tensor=2, zero_stage=3),
    "dense-first-expert2-pp2": muon(model="dense-first-wide", data=2, expert=2, pipeline=2),
    "llama-dualpipev": muon(
        model="llama-deep", data=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "resumed-qwen3-moe-expert4": muon(model="qwen3_moe-wide", data=4, expert=4, zero_stage=2),
}
BF16: dict[str, Case] = {
    "llama-zero1": muon(model="llama", data=2, precision="bf16"),
    "llama-zero3": muon(model="llama", data=2, zero_stage=3, precision="bf16"),
    "gpt2-pp2": muon(model="gpt2-wide", pipeline=2, precision="bf16"),
}


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two-ranks", "four-ranks"])
def test_muon_trains_as_one_process(cases: dict[str, Case], tmp_path: Path, proved: Proved) -> None:
    found = launched(cases, tmp_path, "optimizer_worker.py")
    for name, figures in found.items():
        proved("optimizers", f"muon {name}", figures)
    assert_as_one_process(found)
    # Dummies that even out the groups of pipeline stages are not counted: three of them, twice
    # where there are experts.
    assert all(line["state bytes"] > 100_000 for line in found.values())
    assert all(
        line["state bytes off"] <= (72 if cases[name].pipeline > 1 else 0)
        for name, line in found.items()
    ), found


@pytest.mark.prove
@pytest.mark.launch
def test_half_precision_trains_as_one_process(tmp_path: Path, proved: Proved) -> None:
    """The iterations run in bf16 there, on masters and momentum in fp32."""
    found = launched(BF16, tmp_path, "optimizer_worker.py")
    for name, figures in found.items():
        proved("optimizers", f"muon bf16 {name}", {**figures, "precision": "bf16"})
    assert largest_difference(line["loss"] for line in found.values()) <= BF16_RELATIVE, found
    assert largest_difference(line["norm"] for line in found.values()) <= BF16_RELATIVE, found
    assert all(line["state bytes off"] <= 72 for line in found.values()), found
