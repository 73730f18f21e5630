"""The scores of a forward pass are those of one plain process, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import Proved, launched
from tests.parity.harness import Case

RELATIVE = 1e-6

SAMPLE: dict[str, Case] = {
    "gpt2-tp2-chunked": Case(model="gpt2", tensor=2, loss="chunked"),
    "llama-pp2": Case(model="llama", pipeline=2),
    "llama-zero3": Case(model="llama", data=2, zero_stage=3),
    "gpt2-context2": Case(model="gpt2", context=2),
    "qwen3-moe-expert2": Case(model="qwen3_moe", data=2, expert=2),
}
TWO: dict[str, Case] = {
    "llama-tp2": Case(model="llama", tensor=2),
    "gpt2-pp2-chunked": Case(model="gpt2", pipeline=2, loss="chunked"),
    "gpt2-zero3": Case(model="gpt2", data=2, zero_stage=3),
    "gpt2-zero2": Case(model="gpt2", data=2, zero_stage=2),
    "llama-context2": Case(model="llama", context=2),
    "qwen3-moe-tp2": Case(model="qwen3_moe", tensor=2),
}
FOUR: dict[str, Case] = {
    "llama-tp2-pp2": Case(model="llama", tensor=2, pipeline=2),
    "gpt2-tp2-zero3": Case(model="gpt2", tensor=2, data=2, zero_stage=3),
    "llama-dualpipev": Case(
        model="llama-deep", data=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "llama-context2-tp2": Case(model="llama", context=2, tensor=2),
    "qwen3-moe-expert2-pp2": Case(model="qwen3_moe", data=2, expert=2, pipeline=2),
}


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(TWO, id="two-ranks", marks=pytest.mark.prove),
        pytest.param(FOUR, id="four-ranks", marks=pytest.mark.prove),
    ],
)
def test_scores_are_those_of_one_process(
    cases: dict[str, Case], tmp_path: Path, proved: Proved
) -> None:
    found = launched(cases, tmp_path, "score_worker.py")
    for name, figures in found.items():
        proved("scores", name, figures)

    def largest(name: str) -> float:
        return largest_difference(line[name] for line in found.values())

    for name in ("label", "normalizer", "largest", "of ids"):
        assert largest(name) <= RELATIVE, found
    assert largest("without top") <= 1e-6, found
