"""`activation_checkpointing: {full: N}` trains as one plain process, under every kind of layout,
and runs again the layers that it names and no others; many in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.case_launches import launched
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, Case, compare

pytestmark = pytest.mark.launch

ONE = {"full": 1}
CASES = {
    "one": Case(model="llama", checkpointing={"full": 3}),
    "pp2": Case(model="llama-deep", pipeline=2, checkpointing=ONE),
    "tp2": Case(model="gpt2", tensor=2, checkpointing=ONE),
    "dp2-zero3": Case(model="llama", data=2, zero_stage=3, checkpointing=ONE),
    "dualpipev-pp2": Case(
        model="llama-deep", pipeline=2, schedule="dualpipev", accumulation=4, checkpointing=ONE
    ),
    "gpt2-dualpipev-pp2": Case(
        model="gpt2-deep", pipeline=2, schedule="dualpipev", accumulation=4, checkpointing=ONE
    ),
    "chunked-pp2": Case(model="gpt2-deep", pipeline=2, loss="chunked", checkpointing=ONE),
    "lora-dp2-zero3": Case(
        model="llama", data=2, zero_stage=3, lora_rank=4, checkpointing={"full": 2}
    ),
    "bf16-pp2": Case(model="llama-deep", pipeline=2, precision="bf16", checkpointing=ONE),
    "offload-parameters-dp2": Case(
        model="llama", data=2, zero_stage=3, offload="parameters", checkpointing={"full": 2}
    ),
}


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2])
def test_trains_as_a_plain_process(world: int, tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if case.world == world}
    for name, figures in launched(cases, tmp_path, "partial_worker.py").items():
        check(name, figures)


def check(name: str, figures: dict[str, Any]) -> None:
    half = CASES[name].precision == "bf16"
    assert figures["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), (name, figures)
    assert figures["norm"] <= (BF16_RELATIVE if half else NORM_RELATIVE), (name, figures)


def test_the_commands_and_the_weights(tmp_path: Path) -> None:
    """compile, run, export."""
    compare(Case(model="llama-deep", pipeline=2, tensor=2, checkpointing={"full": 2}), tmp_path)
