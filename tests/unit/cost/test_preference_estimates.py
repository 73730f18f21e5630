"""The estimate of a step of preference training beside that of fine-tuning with as many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.layout_costs import StepTimeBreakdown
from tests.launch.test_overhead import CASES
from tests.launch.test_preference_cost import DPO, LIMIT, write_recipe
from tests.parity.harness import must, shardwright


def estimate(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(must(shardwright("estimate", path, "--json")).stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_preference_is_predicted_to_cost_its_tokens(name: str, tmp_path: Path) -> None:
    plain = estimate(write_recipe(CASES[name], tmp_path / "plain", None))
    pairs = estimate(write_recipe(CASES[name], tmp_path / "pairs", DPO))
    seconds = [each["time"]["step_seconds"] for each in (pairs, plain)]
    memory = [each["memory"]["peak_bytes"] for each in (pairs, plain)]
    assert 1 / LIMIT <= seconds[0] / seconds[1] <= LIMIT
    assert 1 / LIMIT <= memory[0] / memory[1] <= LIMIT


def breakdown(path: Path) -> dict[str, float]:
    explained = json.loads(must(shardwright("explain", path, "--json")).stdout)
    found: dict[str, float] = explained["breakdown"]["step"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_kto_pays_for_a_forward_pass_more(name: str, tmp_path: Path) -> None:
    """Over completions of other prompts, as many as are trained on."""
    plain = breakdown(write_recipe(CASES[name], tmp_path / "plain", None))
    kto = breakdown(write_recipe(CASES[name], tmp_path / "kto", {"name": "kto"}))
    for part in ("forward_seconds", "tensor_forward_seconds"):
        assert kto[part] == pytest.approx(2 * plain[part]), part
    for part in ("backward_seconds", "optimizer_seconds"):
        assert kto[part] == pytest.approx(plain[part]), part
    added = sum(kto.values()) - sum(plain.values())
    assert added >= 0.99 * (plain["forward_seconds"] + plain["tensor_forward_seconds"])


def test_scoring_is_priced_where_the_step_is(tmp_path: Path) -> None:
    path = write_recipe(CASES["pp2"], tmp_path / "pairs", DPO)
    commands = {
        name: json.loads(must(shardwright(name, path, "--json")).stdout)
        for name in ("estimate", "plan", "explain")
    }
    found = commands["estimate"]["scoring"]
    step = StepTimeBreakdown(**commands["explain"]["breakdown"]["step"])
    assert found["step_seconds"] == pytest.approx(step.scoring_seconds(zero_stage=1))
    assert step.forward_seconds < found["step_seconds"] < step.total_seconds / 2
    assert found["training_seconds"] == pytest.approx(found["steps"] * found["step_seconds"])
    assert commands["plan"]["scoring"] == commands["explain"]["scoring"] == found
    for name in ("estimate", "plan"):
        printed = " ".join(must(shardwright(name, path)).stdout.split())
        assert "scoring the reference is scored over all the data before the first step" in printed
        assert "the score file has at most" in printed
    plain = write_recipe(CASES["pp2"], tmp_path / "plain", None)
    assert estimate(plain)["scoring"] is None
    assert "\n  scoring" not in must(shardwright("estimate", plain)).stdout


def test_kto_scores_both_completions(tmp_path: Path) -> None:
    found = estimate(write_recipe(CASES["pp2"], tmp_path / "kto", {"name": "kto"}))["scoring"]
    pairs = estimate(write_recipe(CASES["pp2"], tmp_path / "pairs", DPO))["scoring"]
    # A step of either trains on as many sequences.
    assert found["step_bytes"] == 2 * pairs["step_bytes"]
    assert found["step_seconds"] == pytest.approx(2 * pairs["step_seconds"], rel=0.1)
