"""Refuse optimizers where they were not compared with one process, and engines that lack them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.engines.engine_table import ENGINES
from shardwright.recipe.recipe_types import LoraSection, Recipe
from shardwright.search.training_rules import engine_recipe_errors
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, recipe_of
from tests.unit.search.test_muon_rules import Config, found


def with_optimizer(config: Config, name: str) -> Recipe:
    recipe = recipe_of(config)
    optimizer = replace(recipe.training.optimizer, name=name)
    return replace(recipe, training=replace(recipe.training, optimizer=optimizer))


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2])
@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_accepted(config: Config, name: str) -> None:
    assert not found(with_optimizer(config, name), config)


@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_unverified_settings_are_refused(name: str) -> None:
    recipe = with_optimizer(SMALL_LLAMA, name)
    refused = found(recipe, SMALL_LLAMA, offload="optimizer")["SW3232"]
    assert refused.key == ("parallelism", "offload") and f"the optimizer {name}" in refused.message
    lora = LoraSection(rank=4, alpha=8, dropout=0.0, target_modules=None)
    assert found(replace(recipe, lora=lora), SMALL_LLAMA)["SW3232"].key == ("lora",)


@pytest.mark.parametrize("name", ["muon", "lion", "adafactor"])
def test_megatron_names_what_runs(name: str) -> None:
    recipe = replace(with_optimizer(SMALL_LLAMA, name), target="megatron")
    errors = engine_recipe_errors(ENGINES["megatron"], recipe)
    [error] = [e for e in errors if e.key == ("training", "optimizer", "name")]
    assert error.code == "SW1922" and name in error.message
    assert error.help is not None and "target: deepspeed" in error.help
    assert error.valid == ("adamw",)
