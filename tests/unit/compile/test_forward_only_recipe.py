"""The recipe that `score` derives: the same sequences and weights, with nothing to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.compile.forward_only_recipe import forward_only_recipe
from shardwright.compile.recipe_compiler import compile_recipe, resolve_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_search import choose_layout

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b-8xh100-dpo",
        "qwen3-30b-a3b-4x8h100-dpo",
        "llama-3.1-405b-64x8h100-finetune",
        "qwen3-1.7b-1xrtx4090-offload",
        "tiny-llama-islands-cpu",
        "tiny-llama-megatron-cpu",
        "tiny-llama-muon-cpu",
        "gpt-oss-120b-8x8h100",
    ],
)
def test_no_layout_has_states_or_gradients(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    derived = forward_only_recipe(recipe)
    problem, _ = resolve_recipe(derived)
    found = choose_layout(problem)
    assert all(stage.optimizer_bytes == 0 for stage in found.memory.stages)
    assert all(stage.gradients_bytes == 0 for stage in found.memory.stages)
    assert found.memory.fits
    trained, _ = resolve_recipe(recipe)
    assert found.memory.peak_bytes <= choose_layout(trained).memory.peak_bytes
    assert found.strategy.offload == "none"
    assert (derived.data, derived.training.seed) == (recipe.data, recipe.training.seed)
    assert derived.training.sequence_length == recipe.training.sequence_length
    assert derived.target == "deepspeed"


def test_the_layout_is_pinned_where_it_is_given() -> None:
    recipe = load_recipe(RECIPES / "tiny-dpo-cpu.yaml")
    assert recipe.parallelism.pipeline == 2
    assert forward_only_recipe(recipe).parallelism.pipeline is None
    plan = compile_recipe(forward_only_recipe(recipe, pinned={"tensor": 2})).plan
    assert plan.strategy.tensor == 2
    assert plan.model.frozen
    assert plan.training.objective.name == "dpo", "an example stays two sequences"


def test_adapters_and_the_reference_are_left_out(tmp_path: Path) -> None:
    text = (RECIPES / "tiny-dpo-cpu.yaml").read_text()
    changed = text.replace("beta: 0.1", "beta: 0.1, reference: other, reference_model: more")
    (tmp_path / "recipe.yaml").write_text(changed + "lora: {rank: 4}\n")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.training.objective.reference == str(tmp_path / "other")
    assert recipe.lora is not None
    derived = forward_only_recipe(recipe, weights=tmp_path / "weights")
    assert derived.lora is None
    assert derived.training.objective.reference is None
    assert derived.training.objective.reference_model is None
    assert derived.model.source == str(tmp_path / "weights")
    assert derived.model.weights == "pretrained"


KUBERNETES = "kubernetes: {image: i, volume_claim: c, directory: /shared/dpo}"


@pytest.mark.parametrize(
    ("launch", "key"),
    [
        (f"{{launcher: kubernetes, {KUBERNETES}}}", "launcher"),
        (f"{{{KUBERNETES}}}", "kubernetes"),  # launcher: auto
        ("{launcher: ray}", "launcher"),
        ("{launcher: skypilot, task: {directory: /shared/dpo}}", "launcher"),
        ("{launcher: dstack, task: {directory: /shared/dpo}}", "launcher"),
    ],
)
def test_launchers_whose_jobs_only_train_are_refused(launch: str, key: str) -> None:
    override = f"launch={launch}"
    with pytest.raises(Refusal) as refused:
        forward_only_recipe(load_recipe(RECIPES / "tiny-dpo-cpu.yaml", [override]))
    (diagnostic,) = refused.value.diagnostics
    assert (diagnostic.code, diagnostic.key) == ("SW1265", ("launch", key))
    here = load_recipe(RECIPES / "tiny-dpo-cpu.yaml", [override, "launch=null"])
    assert forward_only_recipe(here).launch.launcher == "auto"


@pytest.mark.parametrize("launcher", ["local", "pdsh", "no_ssh", "openmpi", "slurm"])
def test_other_launchers_are_kept(launcher: str) -> None:
    recipe = load_recipe(RECIPES / "tiny-dpo-cpu.yaml", [f"launch.launcher={launcher}"])
    assert forward_only_recipe(recipe).launch.launcher == launcher
