"""Distillation trains as a plain loop of the formula in one process, under every ZeRO stage and
kind of rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.case_launches import Proved
from tests.parity.distillation import DistillationCase as Case
from tests.parity.objective_layouts import check, over_four_ranks, over_two_ranks

SAMPLE: dict[str, Case] = {
    "llama-tp2-chunked": Case(model="llama", tensor=2, loss="chunked", weight=0.6),
    "gpt2-pp2-packed": Case(model="gpt2", pipeline=2, packed=True, weight=0.3),
    "resumed-llama-context2": Case(model="llama", context=2, resumed=True),
}
TWO: dict[str, Case] = {
    "llama-zero0": Case(model="llama", data=2, zero_stage=0),
    "gpt2-zero1": Case(model="gpt2", data=2, weight=0.5),
    "gpt2-zero2-packed": Case(model="gpt2", data=2, zero_stage=2, packed=True),
    "llama-zero3-chunked": Case(model="llama", data=2, zero_stage=3, loss="chunked"),
    "llama-tp2-one": Case(model="llama", tensor=2, top=1),
    "gpt2-tp2": Case(model="gpt2", tensor=2, checkpointing="full", weight=0.9),
    "llama-pp2": Case(model="llama", pipeline=2),
    "gpt2-pp2-chunked": Case(model="gpt2", pipeline=2, loss="chunked", weight=0.7),
    "llama-context2": Case(model="llama", context=2, accumulation=3, weight=0.5),
    "llama-context2-chunked": Case(model="llama", context=2, loss="chunked", checkpointing="full"),
    "qwen3-moe-expert2": Case(model="qwen3_moe", data=2, expert=2),
    "llama-lora-zero2": Case(model="llama", data=2, zero_stage=2, lora_rank=4),
    "resumed-llama-pp2": Case(model="llama", pipeline=2, resumed=True),
}
FOUR: dict[str, Case] = {
    "llama-tp2-pp2": Case(model="llama", tensor=2, pipeline=2, weight=0.5),
    "llama-tp2-zero3": Case(model="llama", tensor=2, data=2, zero_stage=3),
    "llama-dualpipev-chunked": Case(
        model="llama-deep",
        tensor=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        loss="chunked",
        weight=0.5,
    ),
    "gpt2-dualpipev": Case(
        model="gpt2-deep", data=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "llama-context2-tp2": Case(model="llama", context=2, tensor=2, weight=0.5),
    "qwen3-moe-expert2-tp2": Case(model="qwen3_moe", data=2, expert=2, tensor=2),
    "resumed-llama-context2-zero2": Case(
        model="llama", context=2, data=2, zero_stage=2, resumed=True
    ),
}


EVERY_TWO = {name: Case(weight=0.7, **fields) for name, fields in over_two_ranks().items()}
EVERY_FOUR = {name: Case(weight=0.7, **fields) for name, fields in over_four_ranks().items()}


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(TWO, id="two-ranks", marks=pytest.mark.prove),
        pytest.param(FOUR, id="four-ranks", marks=pytest.mark.prove),
        pytest.param(EVERY_TWO, id="every-layout-two-ranks", marks=pytest.mark.prove),
        pytest.param(EVERY_FOUR, id="every-layout-four-ranks", marks=pytest.mark.prove),
    ],
)
def test_trains_as_one_process(cases: dict[str, Case], tmp_path: Path, proved: Proved) -> None:
    for name, figures in check(cases, tmp_path, "distillation_worker.py").items():
        proved("distillation", name, figures)
