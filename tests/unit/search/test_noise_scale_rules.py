"""Where the noise scale is not measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import NoiseScaleSection, Recipe, TrackingSection
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

PLAIN: dict[str, Any] = {"pipeline": 1, "tensor": 1, "data": 8, "gradient_accumulation_steps": 2}
Config = dict[str, JsonValue]


def measured(config: Config) -> Recipe:
    tracking = TrackingSection(
        tensorboard=False, wandb=None, noise_scale=NoiseScaleSection(every_steps=50, rows=32)
    )
    return replace(recipe_of(config), tracking=tracking)


def found(recipe: Recipe, config: Config, **layout: object) -> dict[str, Diagnostic]:
    problem = Problem(
        recipe=recipe, graph=graph_of(config), cluster=resolve_cluster(recipe.cluster)
    )
    return {d.code: d for d in check_layout(problem, change(**{**PLAIN, **layout}))}


@pytest.mark.parametrize(
    ("config", "layout", "key"),
    [
        (
            SMALL_LLAMA,
            {"context": 2, "data": 4, "gradient_accumulation_steps": 4},
            "parallelism.context",
        ),
        (SMALL_LLAMA, {"expert": 2}, "parallelism.expert"),
        (
            SMALL_GPT2,
            {"pipeline": 2, "data": 4, "gradient_accumulation_steps": 4},
            "parallelism.pipeline",
        ),
        (SMALL_GPT2, {"tensor": 2, "data": 4, "gradient_accumulation_steps": 4}, None),
        (SMALL_LLAMA, {"pipeline": 2, "data": 4, "gradient_accumulation_steps": 4}, None),
        (SMALL_LLAMA, {"zero_stage": 3}, None),
    ],
)
def test_layouts(config: Config, layout: dict[str, Any], key: str | None) -> None:
    diagnostic = found(measured(config), config, **layout).get("SW3191")
    assert (None if diagnostic is None else ".".join(map(str, diagnostic.key or ()))) == key
    assert "SW3191" not in found(recipe_of(config), config, **layout)


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("training", {"precision": "fp16"}, "training.precision"),
        (
            "training",
            {"precision": "bf16", "gradient_accumulation_dtype": "bf16"},
            "gradient_accumulation_dtype",
        ),
        ("model", {"router_aux_loss": 0.001}, "model.router_aux_loss"),
        ("model", {"kernels": "compile"}, "model.kernels"),
        ("cluster", {"islands": 2, "inter_island_gbits_per_second": 1.0}, "cluster.islands"),
    ],
)
def test_keys(section: str, values: dict[str, Any], key: str) -> None:
    recipe = measured(SMALL_LLAMA)
    recipe = replace(recipe, **{section: replace(getattr(recipe, section), **values)})
    diagnostic = found(recipe, SMALL_LLAMA)["SW3191"]
    assert ".".join(map(str, diagnostic.key or ())).endswith(key)
    assert "remove tracking.noise_scale" in (diagnostic.help or "")


@pytest.mark.parametrize("target", ["megatron", "reference"])
def test_engines(target: str) -> None:
    assert found(replace(measured(SMALL_LLAMA), target=target), SMALL_LLAMA)["SW3191"].key == (
        "target",
    )


def test_one_micro_batch_is_the_whole_batch() -> None:
    alone = {"data": 1, "gradient_accumulation_steps": 1, "micro_batch_size": 16}
    assert found(measured(SMALL_LLAMA), SMALL_LLAMA, **alone)["SW3192"].severity == "error"
    assert "SW3192" not in found(recipe_of(SMALL_LLAMA), SMALL_LLAMA, **alone)
    assert "SW3192" not in found(measured(SMALL_LLAMA), SMALL_LLAMA)
