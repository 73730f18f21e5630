"""A checkpoint whose masters are not the weights that were trained is refused, under every kind of
engine: a test of the check itself, in one launch. Every parity case and every run that saves passes
it too. And a new start's masters are the stored weights, not their rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.case_launches import launched
from tests.parity.harness import Case

CASES = {
    "zero1": Case(model="llama", data=2),
    "zero2-round-robin": Case(model="llama", data=2, zero_stage=2),
    "zero3-lora": Case(model="llama", data=2, zero_stage=3, lora_rank=4),
    "bf16-pipeline": Case(model="llama-tied", pipeline=2, precision="bf16"),
    "fp16-zero2": Case(model="llama", data=2, zero_stage=2, precision="fp16"),
    "bf16-offload-parameters": Case(
        model="llama", data=2, zero_stage=3, offload="parameters", precision="bf16"
    ),
}

STORED_IN_FP32 = {
    "stored-zero1": Case(model="gpt2", data=2, precision="bf16", pretrained=True),
    "stored-zero2": Case(
        model="llama-tied", data=2, zero_stage=2, precision="bf16", pretrained=True
    ),
    "stored-zero3": Case(model="llama", data=2, zero_stage=3, precision="bf16", pretrained=True),
    "stored-zero3-fp16": Case(
        model="llama", data=2, zero_stage=3, precision="fp16", pretrained=True
    ),
    "stored-pipeline": Case(model="llama-tied", pipeline=2, precision="bf16", pretrained=True),
    "stored-tensor": Case(model="gpt2", tensor=2, precision="bf16", pretrained=True),
    "stored-experts": Case(model="mixtral", data=2, expert=2, precision="bf16", pretrained=True),
    "stored-experts-zero3": Case(
        model="mixtral", data=2, expert=2, zero_stage=3, precision="bf16", pretrained=True
    ),
    "stored-offload": Case(
        model="llama", data=2, zero_stage=2, offload="optimizer", precision="bf16", pretrained=True
    ),
}


@pytest.mark.launch
def test_masters_start_from_the_stored_weights(tmp_path: Path) -> None:
    launched(STORED_IN_FP32, tmp_path, "masters_worker.py")


@pytest.mark.launch
def test_masters_that_are_not_the_live_weights(tmp_path: Path) -> None:
    launched(CASES, tmp_path, "masters_worker.py")
