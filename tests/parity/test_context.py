"""Rows cut over context ranks train as the plain process does, under every engine of DeepSpeed's,
many layouts in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import launched, sample_of
from tests.parity.harness import LOSS_ABSOLUTE, NORM_RELATIVE, Case, compare

TWO: dict[str, Case] = {
    "llama-zero0": Case(model="llama", context=2, zero_stage=0),
    "llama-zero1": Case(model="llama", context=2),
    "llama-zero2": Case(model="llama", context=2, zero_stage=2),
    "llama-zero3": Case(model="llama", context=2, zero_stage=3),
    "gpt2-zero1": Case(model="gpt2", context=2),
    "gpt2-zero3-selective": Case(model="gpt2", context=2, zero_stage=3, checkpointing="selective"),
    "gemma2-zero2": Case(model="gemma2", context=2, zero_stage=2),
    "qwen2-zero1-full": Case(model="qwen2", context=2, checkpointing="full"),
    "llama-tied-chunked": Case(model="llama-tied", context=2, loss="chunked"),
    "llama-chunked-zero3": Case(model="llama", context=2, zero_stage=3, loss="chunked"),
    "llama-offload": Case(model="llama", context=2, zero_stage=2, offload="optimizer"),
    "llama-lora": Case(model="llama", context=2, lora_rank=4),
    "gpt2-lora-zero3": Case(model="gpt2", context=2, zero_stage=3, lora_rank=4),
    "mixtral-zero1": Case(model="mixtral", context=2),
}
FOUR: dict[str, Case] = {
    "llama-pp2": Case(model="llama", context=2, pipeline=2),
    "llama-tied-pp2-chunked": Case(model="llama-tied", context=2, pipeline=2, loss="chunked"),
    "gpt2-pp2-full": Case(model="gpt2", context=2, pipeline=2, checkpointing="full"),
    "gpt2-dualpipev-pp2": Case(
        model="gpt2", context=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "llama-tp2": Case(model="llama", context=2, tensor=2),
    "gpt2-tp2-zero3": Case(model="gpt2", context=2, tensor=2, zero_stage=3),
    "llama-dp2-zero3": Case(model="llama", context=2, data=2, zero_stage=3),
    "llama-dp2-zero1": Case(model="llama", context=2, data=2),
    "llama-4": Case(model="llama", context=4),
}


EVALUATED: dict[str, Case] = {
    "1f1b-packed": Case(model="llama-tied", context=2, pipeline=2, accumulation=3),
    "dualpipev-chunked-packed": Case(
        model="llama-tied",
        context=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        loss="chunked",
    ),
    "tensor-packed": Case(model="llama", context=2, tensor=2),
    "data-whole": Case(model="gpt2", context=2, data=2),
}
"""Those that end in "packed" hold out packed documents."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            sample_of(TWO, "llama-zero3", "gemma2-zero2", "gpt2-lora-zero3", "mixtral-zero1"),
            id="sample",
        ),
        pytest.param(TWO, id="two-ranks", marks=pytest.mark.prove),
        pytest.param(FOUR, id="four-ranks", marks=pytest.mark.prove),
    ],
)
def test_context_ranks_train_as_one_process(cases: dict[str, Case], tmp_path: Path) -> None:
    found = launched(cases, tmp_path)
    assert largest_difference(line["loss"] for line in found.values()) <= LOSS_ABSOLUTE, found
    assert largest_difference(line["norm"] for line in found.values()) <= NORM_RELATIVE, found


@pytest.mark.prove
@pytest.mark.launch
def test_held_out_rows_are_evaluated_as_by_one_process(tmp_path: Path) -> None:
    for name, figures in launched(EVALUATED, tmp_path, "evaluation_worker.py").items():
        assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
        assert (figures["tokens"], figures["steps"]) == (0, 0), (name, figures)


@pytest.mark.prove
@pytest.mark.launch
def test_compiled_run_and_exported(tmp_path: Path) -> None:
    compare(Case(model="gpt2", context=2, zero_stage=3), tmp_path)
