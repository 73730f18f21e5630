"""Refuse Muon where it does not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import LoraSection, Recipe
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

Config = dict[str, JsonValue]
MAMBA: Config = {
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 257,
}
NEOX: Config = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 257,
}


def with_muon(config: Config, **training: Any) -> Recipe:
    recipe = recipe_of(config, training=training)
    optimizer = replace(
        recipe.training.optimizer, name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4
    )
    return replace(recipe, training=replace(recipe.training, optimizer=optimizer))


def found(recipe: Recipe, config: Config, **layout: Any) -> dict[str, Diagnostic]:
    problem = Problem(
        recipe=recipe, graph=graph_of(config), cluster=resolve_cluster(recipe.cluster)
    )
    return {
        d.code: d for d in check_layout(problem, change(**layout)) if d.code in ("SW3231", "SW3232")
    }


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2, NEOX])
def test_accepted(config: Config) -> None:
    assert not found(with_muon(config), config)


def test_joined_matrices_of_unknown_order_are_refused() -> None:
    diagnostic = found(with_muon(MAMBA), MAMBA)["SW3231"]
    assert diagnostic.severity == "error"
    assert "backbone.layers.0.mixer.in_proj.weight" in diagnostic.message
    assert not found(recipe_of(MAMBA), MAMBA)


def test_unverified_settings_are_refused() -> None:
    muon = with_muon(SMALL_LLAMA)
    assert found(muon, SMALL_LLAMA, offload="optimizer")["SW3232"].key == ("parallelism", "offload")
    lora = LoraSection(rank=4, alpha=8, dropout=0.0, target_modules=None)
    assert found(replace(muon, lora=lora), SMALL_LLAMA)["SW3232"].key == ("lora",)
    half = with_muon(SMALL_LLAMA, precision="fp16")
    assert found(half, SMALL_LLAMA)["SW3232"].key == ("training", "precision")
    assert not found(recipe_of(SMALL_LLAMA), SMALL_LLAMA, offload="optimizer")
