"""calibrate and tune on this CPU: real processes, real runs, and a plan that is made of what they
took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.harness import must, shardwright
from tests.unit.calibrate.test_measurement_file import recipe_file


@pytest.mark.launch
def test_calibrated_then_tuned(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, None)
    must(shardwright("calibrate", recipe, "--minutes", "0.05", "-o", tmp_path / "measured.json"))
    document = json.loads(recipe.read_text())
    document["cluster"]["measured"] = "measured.json"
    recipe.write_text(json.dumps(document))
    measured = load_recipe(recipe).cluster.measured
    assert measured is not None
    found = measured.found
    assert {"gemm_efficiency", "memory_efficiency", "intra_node_efficiency"} <= set(found.constants)
    assert found.machine.ranks == 2 and found.layers and found.engine
    assert all(figure.n >= 3 for figure in found.constants.values())
    must(
        shardwright(
            "tune", recipe, "--top", "1", "--steps", "2", "-o", tmp_path / "tuned.json", "--pin"
        )
    )
    document = json.loads(recipe.read_text())
    document["cluster"]["measured"] = "tuned.json"
    recipe.write_text(json.dumps(document))
    tuned = load_recipe(recipe).cluster.measured
    assert tuned is not None and tuned.found.constants == found.constants
    runs = tuned.found.runs
    assert len(runs) >= 2  # today's too
    fastest = min(runs, key=lambda run: run.step_seconds.value)
    assert document["parallelism"] == fastest.pins
    told = json.loads(must(shardwright("estimate", recipe, "--json")).stdout)
    assert told["time"]["step_seconds"] == pytest.approx(fastest.step_seconds.value)
