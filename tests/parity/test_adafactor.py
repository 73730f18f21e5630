"""Adafactor trains as torch's does in one process, under every ZeRO stage and kind of rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.parity.case_launches import Proved, launched
from tests.parity.harness import Case
from tests.parity.plain_optimizers import assert_as_one_process

adafactor = partial(Case, optimizer="adafactor")
TWO: dict[str, Case] = {
    "llama-zero0": adafactor(model="llama", data=2, zero_stage=0),
    "llama-zero1": adafactor(model="llama", data=2),
    "gpt2-zero2": adafactor(model="gpt2-wide", data=2, zero_stage=2),
    "llama-tied-zero3": adafactor(model="llama-tied", data=2, zero_stage=3),
    "llama-tied-pp2": adafactor(model="llama-tied", pipeline=2),
    "llama-tp2": adafactor(model="llama", tensor=2),
    "gpt2-tp2-zero0": adafactor(model="gpt2-wide", tensor=2, zero_stage=0),
    "llama-context2": adafactor(model="llama", context=2),
    "qwen3-moe-expert2": adafactor(model="qwen3_moe-wide", data=2, expert=2),
    "unscaled-llama-zero3": Case(
        model="llama", data=2, zero_stage=3, optimizer="adafactor-unscaled"
    ),
    "resumed-llama-tied-pp2": adafactor(model="llama-tied", pipeline=2),
    "resumed-gpt2-tp2": adafactor(model="gpt2-wide", tensor=2),
    "resumed-qwen3-moe-expert2": adafactor(model="qwen3_moe-wide", data=2, expert=2, zero_stage=3),
}
FOUR: dict[str, Case] = {
    "llama-tp4": adafactor(model="llama", tensor=4),
    "llama-tied-tp2-zero3": adafactor(model="llama-tied", tensor=2, data=2, zero_stage=3),
    "qwen3-moe-expert2-tp2": adafactor(
        model="qwen3_moe-wide", data=2, expert=2, tensor=2, zero_stage=3
    ),
    "qwen3-moe-expert2-pp2": adafactor(model="qwen3_moe-wide", data=2, expert=2, pipeline=2),
    "resumed-qwen3-moe-expert2-tp2": adafactor(model="qwen3_moe-wide", data=2, expert=2, tensor=2),
}


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two-ranks", "four-ranks"])
def test_adafactor_trains_as_one_process(
    cases: dict[str, Case], tmp_path: Path, proved: Proved
) -> None:
    found = launched(cases, tmp_path, "optimizer_worker.py")
    for name, figures in found.items():
        proved("optimizers", f"adafactor {name}", figures)
    assert_as_one_process(found)
    # At stage 0 there are no fp32 weights of the optimizer's own: the factors alone.
    assert all(
        line["state bytes"] > (100_000 if cases[name].zero_stage else 10_000)
        for name, line in found.items()
    ), found
    # Dummies that even out the groups of pipeline stages are not counted.
    assert all(
        line["state bytes off"] <= (72 if cases[name].pipeline > 1 else 0)
        for name, line in found.items()
        if cases[name].tensor == 1
    ), found
