"""Random recipes train as one plain process does, or are refused with a code."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.data.sequences import SequenceBatch
from tests.random_runs.draw import THEMES, draw
from tests.random_runs.launch import run
from tests.random_runs.plain import sequences

SAMPLE = (103, 105, 106, 107, 109, 111, 112, 113, 121, 122, 1116)
"""Of `make test-more`, drawn from themes that differ."""
FULL = range(1000, 1480)
"""Of `make prove`: at least RUNS of them train, the others are refused."""
RUNS = 300


def check(found: dict[int, dict[str, Any]]) -> None:
    bad = {
        seed: line for seed, line in found.items() if line["outcome"] not in ("equal", "refused")
    }
    assert bad == {}, "\n".join(f"{seed}: {line}" for seed, line in bad.items())


PADDING = (119, 1045)
"""Megatron-Core on data that holds the padding id, whose row of the embedding Hugging Face keeps
still."""


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
)
def test_the_padding_row_is_kept_still(tmp_path: Path) -> None:
    found = run(PADDING, tmp_path)
    check(found)
    assert [line["outcome"] for line in found.values()] == ["equal", "equal"]


WITHOUT_DROPOUT = (2207, 4186)
"""Validations in a pipeline whose training drops out: DualPipeV, and 1F1B of a type that drops out
of its embedding."""


LENGTHS = (5069, 5187, 5311)
"""Rotary embeddings of type longrope and dynamic over context ranks, their switch inside of the
sequence."""


@pytest.mark.prove
@pytest.mark.launch
def test_rotary_embeddings_see_whole_sequences(tmp_path: Path) -> None:
    found = run(LENGTHS, tmp_path)
    check(found)
    assert {line["outcome"] for line in found.values()} == {"equal"}


@pytest.mark.prove
@pytest.mark.launch
def test_validation_in_a_pipeline_drops_nothing_out(tmp_path: Path) -> None:
    found = run(WITHOUT_DROPOUT, tmp_path)
    check(found)
    assert [line["outcome"] for line in found.values()] == ["equal", "equal"]


@pytest.mark.launch
def test_a_sample_of_random_runs(tmp_path: Path) -> None:
    found = run(SAMPLE, tmp_path)
    check(found)
    assert sum(line["outcome"] == "equal" for line in found.values()) >= len(SAMPLE) * 2 // 3


@pytest.mark.prove
@pytest.mark.launch
def test_random_runs(tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]) -> None:
    found = run(FULL, tmp_path)
    for seed, line in found.items():
        proved("random-runs", str(seed), {k: v for k, v in line.items() if k != "error"})
    check(found)
    codes = Counter(
        code for line in found.values() for code in (line.get("code"), line.get("second")) if code
    )
    proved("random-runs", "refusals by code", dict(codes))
    assert sum(line["outcome"] == "equal" for line in found.values()) >= RUNS


def test_every_theme_is_drawn() -> None:
    cases = [draw(seed) for seed in FULL]
    assert {case.theme for case in cases} == set(THEMES)
    assert len({case.config["model_type"] for case in cases}) >= 60
    assert {case.recipe["data"].get("kind", "mixture") for case in cases} == {
        *("tokens", "text", "jsonl", "chat", "mixture")
    }
    assert sum(case.second is not None for case in cases) >= 60


def test_a_seed_is_the_same_case_everywhere() -> None:
    random.seed(1)
    first = draw(1001)
    random.seed(2)
    torch.manual_seed(3)
    assert draw(1001) == first


def test_documents_of_a_packed_row_are_alone() -> None:
    starts, trained = (
        np.array([[1, 0, 0, 1, 0, 1]], dtype=bool),
        np.array([[1, 1, 1, 1, 0, 1]], dtype=bool),
    )
    block = SequenceBatch(tokens=np.array([[5, 6, 7, 8, 9, 4]]), starts=starts, loss_mask=trained)
    # The second document has no label behind its first token, the third has one token.
    assert [(ids.tolist(), labels.tolist()) for ids, labels in sequences(block)] == [
        ([5, 6, 7], [-100, 6, 7])
    ]
    whole = SequenceBatch(tokens=block.tokens, loss_mask=trained)
    assert [(i.tolist(), n.tolist()) for i, n in sequences(whole)] == [
        ([5, 6, 7, 8, 9, 4], [-100, 6, 7, 8, -100, 4])
    ]
