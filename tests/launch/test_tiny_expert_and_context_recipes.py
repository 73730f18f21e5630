"""The ready recipes of expert ranks, of context ranks and of Muon train on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parity.harness import check_live_split, metrics, must, shardwright

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 12


@pytest.mark.launch
@pytest.mark.parametrize("name", ["tiny-moe-cpu", "tiny-long-cpu", "tiny-llama-muon-cpu"])
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
