"""Dropout under tensor parallelism, on the real engines: who shares a mask with whom, and that
recomputation draws the same numbers again. That a resumed run draws them too is tests/launch and
`make prove`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.figures import same
from tests.parity.dropout_cases import LAYOUTS
from tests.worker_launch import launch_worker

pytestmark = pytest.mark.launch

MODELS = ("gpt2", "opt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("dropout")
    result = launch_worker(
        Path(__file__).with_name("dropout_worker.py"),
        4,
        seconds=600,
        SHARDWRIGHT_DROPOUT_OUT=str(out),
        SHARDWRIGHT_DROPOUT_MODELS=",".join(MODELS),
    )
    assert (out / "figures.json").exists(), result.stdout[-3000:] + result.stderr[-3000:]
    figures: dict[str, dict[str, Any]] = json.loads((out / "figures.json").read_text())
    return figures


CASES = [f"{model} {layout}" for model in MODELS for layout in LAYOUTS]


@pytest.mark.parametrize("case", CASES)
def test_recomputation_draws_the_same_numbers(found: dict[str, dict[str, Any]], case: str) -> None:
    for numbers, weights in zip(found[case]["numbers"], found[case]["weights"], strict=True):
        assert same(numbers["selective"], numbers["none"]) and same(
            numbers["full"], numbers["none"]
        )
        assert weights["selective"] == weights["none"] == weights["full"]


@pytest.mark.parametrize("case", CASES)
def test_who_shares_a_mask(found: dict[str, dict[str, Any]], case: str) -> None:
    figures = found[case]
    ranks = [tuple(at) for at in figures["coordinates"]]
    for (a, at_a), (b, at_b) in itertools.combinations(enumerate(ranks), 2):
        whole = figures["whole"][a], figures["whole"][b]
        cut = figures["cut"][a], figures["cut"][b]
        assert whole[0] and cut[0], "no dropout was seen"
        assert not set(cut[0]) & set(cut[1])
        if at_a[:2] == at_b[:2]:  # tensor ranks of one model copy
            assert whole[0] == whole[1]
            assert figures["outputs"][a] == figures["outputs"][b] != []
        else:
            assert not set(whole[0]) & set(whole[1])
