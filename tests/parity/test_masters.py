"""A checkpoint whose masters are not the weights that were trained is refused, under every kind of engine: a test of
the check itself, in one launch. Every parity case and every run that saves passes it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.harness import Case
from tests.parity.launched import launched

CASES = {
    "zero1": Case(model="llama", data=2),
    "zero2-round-robin": Case(model="llama", data=2, zero_stage=2),
    "zero3-lora": Case(model="llama", data=2, zero_stage=3, lora_rank=4),
    "bf16-pipeline": Case(model="llama-tied", pipeline=2, precision="bf16"),
    "fp16-zero2": Case(model="llama", data=2, zero_stage=2, precision="fp16"),
    "bf16-offload-parameters": Case(model="llama", data=2, zero_stage=3, offload="parameters", precision="bf16"),
}


@pytest.mark.launch
def test_masters_that_are_not_the_live_weights(tmp_path: Path) -> None:
    launched(CASES, tmp_path, "masters_worker.py")
