"""The ready recipes of expert ranks, context ranks, Muon and preferences train on this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.parity.harness import check_live_split, metrics, must, shardwright

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 12


@pytest.mark.launch
@pytest.mark.parametrize(
    "name",
    ["tiny-moe-cpu", "tiny-long-cpu", pytest.param("tiny-llama-muon-cpu", marks=pytest.mark.prove)],
)
def test_a_ready_recipe_trains(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    must(
        shardwright(
            "compile", RECIPES / f"{name}.yaml", "-o", out, "--set", f"training.steps={STEPS}"
        )
    )
    must(shardwright("run", out))
    losses = [line["loss"] for line in metrics(out)]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5, losses
    check_live_split(out)
    plan = json.loads((out / "plan.json").read_text())
    if name == "tiny-moe-cpu":
        of_rank = json.loads((out / "run/ranks/rank-00000.json").read_text())["shapes"]
        experts = [shape for path, shape in of_rank.items() if ".experts." in path]
        assert experts and {shape[0] for shape in experts} == {8 // plan["strategy"]["expert"]}
    elif name == "tiny-long-cpu":
        assert plan["strategy"]["context"] == 2
    else:
        assert "model.layers.*.mlp.up_proj.weight" in plan["muon"]


@pytest.mark.launch
def test_the_preference_recipe_learns_to_rank(tmp_path: Path) -> None:
    """Held-out pairs are ranked by chance before the first step, and right after the last."""
    out = tmp_path / "out"
    must(shardwright("compile", RECIPES / "tiny-dpo-cpu.yaml", "-o", out))
    printed = must(shardwright("run", out)).stdout
    assert "examples scored" in printed
    lines = metrics(out)
    assert abs(lines[0]["loss"] - math.log(2)) < 1e-4
    evaluations = (out / "run" / "evaluation.jsonl").read_text().splitlines()
    last = json.loads(evaluations[-1])
    assert last["step"] == lines[-1]["step"] and last["accuracy"] >= 0.9, last
    assert last["margin"] > 0 and last["pairs"] >= 40


@pytest.mark.launch
@pytest.mark.prove
def test_the_reward_recipe_learns_to_rank(tmp_path: Path) -> None:
    out = tmp_path / "out"
    must(shardwright("compile", RECIPES / "tiny-reward-cpu.yaml", "-o", out))
    must(shardwright("run", out))
    evaluations = (out / "run" / "evaluation.jsonl").read_text().splitlines()
    last = json.loads(evaluations[-1])
    assert last["step"] == metrics(out)[-1]["step"] and last["accuracy"] >= 0.9, last
    assert last["rewards_chosen"] > 0 > last["rewards_rejected"] and last["pairs"] >= 40
