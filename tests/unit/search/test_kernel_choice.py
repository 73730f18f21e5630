"""model.kernels: auto takes torch.compile where it is proved and faster. It is priced as
assume.kernels: compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import resolve_recipe
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.plan_sentences import chosen_kernels_text
from shardwright.search.kernel_choice import chosen_kernels
from shardwright.search.layout_search import search
from shardwright.search.runnable_recipes import check_runnable
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA

MAMBA: dict[str, JsonValue] = {
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 259,
}


def recipe(folder: Path, config: dict[str, JsonValue] = SMALL_LLAMA, **model: object) -> Recipe:
    document: dict[str, Any] = {
        "version": 1,
        "name": "kernels",
        "model": {"config": config, "weights": "random", **model},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "training": {"sequence_length": 128, "global_batch_size": 16, "steps": 10},
        "data": {"kind": "synthetic"},
    }
    if "assume" in model:
        document["assume"] = document["model"].pop("assume")
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(document))
    return load_recipe(path)


def test_auto_takes_what_is_faster(tmp_path: Path) -> None:
    problem, _ = resolve_recipe(recipe(tmp_path, kernels="auto"))
    found = chosen_kernels(problem)
    assert found is not None and found.kernels == problem.recipe.model.kernels == "compile"
    assert found.other_seconds is not None and found.seconds < found.other_seconds
    assert f"{found.other_seconds:.3g} s with hf" in chosen_kernels_text(found)
    plain, _ = resolve_recipe(recipe(tmp_path))
    assert (
        search(plain).ranked[0].time.step_seconds == found.other_seconds
        and chosen_kernels(plain) is None
    )


def test_auto_takes_what_is_proved(tmp_path: Path) -> None:
    problem, _ = resolve_recipe(recipe(tmp_path, MAMBA, kernels="auto"))
    found = chosen_kernels(problem)
    assert found is not None and found.kernels == problem.recipe.model.kernels == "hf"
    assert found.other_seconds is None and "no layout runs with compile" in chosen_kernels_text(
        found
    )
    assert problem.recipe.assume.kernels == "auto"


def test_auto_takes_what_the_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    recipe(tmp_path, kernels="auto")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target": "megatron"}))
    problem, _ = resolve_recipe(load_recipe(path))
    assert problem.recipe.model.kernels == "hf" and search(problem).ranked


def test_what_is_assumed_and_what_runs_is_one_thing(tmp_path: Path) -> None:
    runs, assumed = (
        recipe(tmp_path, kernels="compile"),
        recipe(tmp_path, assume={"kernels": "compiled"}),
    )
    times = {}
    for name, each in (("runs", runs), ("assumed", assumed)):
        problem, _ = resolve_recipe(each)
        times[name] = {e.strategy: (e.time, e.memory) for e in search(problem).ranked}
    assert times["runs"] and all(times["assumed"][s] == found for s, found in times["runs"].items())
    assert check_runnable(runs) == ()
    (refused,) = check_runnable(assumed)
    assert refused.code == "SW1914" and "model.kernels: compile" in refused.help


@pytest.mark.parametrize("kernels", ["hf", "compile"])
def test_a_recipe_that_says_the_default_is_the_same_recipe(kernels: str, tmp_path: Path) -> None:
    said, left_out = recipe(tmp_path, kernels=kernels), recipe(tmp_path)
    assert (said.document == left_out.document) == (kernels == "hf")
    assert dataclasses.replace(said.model, kernels="hf") == left_out.model
