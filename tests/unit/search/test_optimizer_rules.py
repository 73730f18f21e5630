"""Refuse optimizers where they were not compared with one process, and engines that lack them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.engines.engine_table import ENGINES
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import LoraSection, Recipe
from shardwright.search.rule_registry import check_layout
from shardwright.search.training_rules import engine_recipe_errors
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change
from tests.unit.search.test_muon_rules import Config, found


def with_optimizer(config: Config, name: str) -> Recipe:
    recipe = recipe_of(config)
    optimizer = replace(recipe.training.optimizer, name=name)
    return replace(recipe, training=replace(recipe.training, optimizer=optimizer))


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2])
@pytest.mark.parametrize("name", ["lion", "adafactor", "adamw_8bit"])
def test_accepted(config: Config, name: str) -> None:
    assert not found(with_optimizer(config, name), config)


@pytest.mark.parametrize("name", ["lion", "adafactor", "adamw_8bit"])
def test_unverified_settings_are_refused(name: str) -> None:
    recipe = with_optimizer(SMALL_LLAMA, name)
    refused = found(recipe, SMALL_LLAMA, offload="optimizer")["SW3232"]
    assert refused.key == ("parallelism", "offload") and f"the optimizer {name}" in refused.message
    lora = LoraSection(rank=4, alpha=8, dropout=0.0, target_modules=None)
    assert found(replace(recipe, lora=lora), SMALL_LLAMA)["SW3232"].key == ("lora",)


@pytest.mark.parametrize("name", ["lion", "adafactor", "adamw_8bit"])
def test_megatron_names_what_runs(name: str) -> None:
    recipe = replace(with_optimizer(SMALL_LLAMA, name), target="megatron")
    errors = engine_recipe_errors(ENGINES["megatron"], recipe)
    [error] = [e for e in errors if e.key == ("training", "optimizer", "name")]
    assert error.code == "SW1922" and name in error.message
    assert error.help is not None and "target: deepspeed" in error.help
    assert error.valid == ("adamw", "muon")


WIDE: Config = {**SMALL_LLAMA, "hidden_size": 512, "intermediate_size": 512}
EXPERTS: Config = {
    **SMALL_LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(
    ("config", "layout", "axis"),
    [
        (SMALL_LLAMA, {"tensor": 1}, None),
        (SMALL_LLAMA, {"tensor": 2}, "tensor"),
        (WIDE, {"tensor": 2}, None),
        (WIDE, {"tensor": 4}, "tensor"),
        (EXPERTS, {"tensor": 1, "expert": 2, "data": 2}, None),
    ],
)
def test_ranks_that_cut_blocks_are_refused(
    config: Config, layout: dict[str, int], axis: str | None
) -> None:
    problem = Problem(
        recipe=with_optimizer(config, "adamw_8bit"),
        graph=graph_of(config),
        cluster=resolve_cluster(recipe_of(config).cluster),
    )
    refused = [d for d in check_layout(problem, change(**layout)) if d.code == "SW3233"]
    assert bool(refused) == (axis is not None)
    if axis is not None:
        assert refused[0].key == ("parallelism", axis)
        assert refused[0].severity == "error" and "256" in refused[0].message
    adamw = Problem(recipe=recipe_of(config), graph=problem.graph, cluster=problem.cluster)
    assert "SW3233" not in {d.code for d in check_layout(adamw, change(**layout))}
