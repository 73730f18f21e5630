"""Optimizers update fp32 masters of weights in half precision as one process updates fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import Proved, launched
from tests.parity.harness import BF16_RELATIVE, Case

BF16: dict[str, Case] = {
    f"{name}-zero{stage}": Case(
        model="llama", data=2, zero_stage=stage, precision="bf16", optimizer=name
    )
    for name in ("lion", "adafactor", "adamw_8bit")
    for stage in (1, 3)
}


@pytest.mark.prove
@pytest.mark.launch
def test_half_precision_trains_as_one_process(tmp_path: Path, proved: Proved) -> None:
    found = launched(BF16, tmp_path, "optimizer_worker.py")
    for name, figures in found.items():
        proved("optimizers", f"bf16 {name}", {**figures, "precision": "bf16"})
    assert largest_difference(line["loss"] for line in found.values()) <= BF16_RELATIVE, found
    assert largest_difference(line["norm"] for line in found.values()) <= BF16_RELATIVE, found
    assert all(line["state bytes off"] <= 200 for line in found.values()), found
