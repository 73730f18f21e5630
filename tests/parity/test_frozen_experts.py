"""Experts that are frozen under expert ranks, and experts of sizes that torch's grouped_mm does not
take: both train as one plain process, in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.case_launches import launched
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, Case

EXPERTS = ("model.layers.*.mlp.experts.*",)
SOME = ("model.layers.0.mlp.experts.*",)
CASES = {
    **{
        f"frozen-zero{stage}": Case(
            model="mixtral", data=2, expert=2, zero_stage=stage, freeze=EXPERTS
        )
        for stage in (1, 2, 3)
    },
    "some-frozen-zero1": Case(model="mixtral", data=2, expert=2, freeze=SOME),
    "some-frozen-zero3": Case(model="mixtral", data=2, expert=2, zero_stage=3, freeze=SOME),
    # 100 / 2 = 50 columns of an expert on each tensor rank: 100 bytes in bf16.
    "odd-bf16-tensor": Case(model="mixtral-odd", tensor=2, precision="bf16"),
    "odd-bf16-expert": Case(model="mixtral-odd", data=2, expert=2, precision="bf16"),
    "odd-fp32-tensor": Case(model="mixtral-odd", tensor=2),
}


@pytest.mark.prove
@pytest.mark.launch
def test_experts_train_as_one_plain_process(tmp_path: Path) -> None:
    for name, figures in launched(CASES, tmp_path).items():
        half = CASES[name].precision == "bf16"
        assert figures["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), (name, figures)
        assert figures["norm"] <= (BF16_RELATIVE if half else NORM_RELATIVE), (name, figures)
