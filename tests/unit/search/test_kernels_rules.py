"""`model.kernels: compile` is refused where it was not verified, each time with a code."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.recipe_types import (
    FLASH_ATTENTION_2,
    LoraSection,
    Recipe,
    with_resolved_kernels,
)
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

PLAIN = change(tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2)
ADAPTERS = LoraSection(rank=4, alpha=8.0, dropout=0.0, target_modules=("q_proj",))


def told(
    recipe: Recipe,
    strategy: Layout = PLAIN,
    config: dict[str, JsonValue] = SMALL_LLAMA,
    **graph: object,
) -> dict[str, Diagnostic]:
    problem = Problem(
        recipe=with_resolved_kernels(recipe, "compile"),
        graph=dataclasses.replace(graph_of(config), **graph),  # type: ignore[arg-type]
        cluster=resolve_cluster(recipe.cluster),
    )
    return {d.code: d for d in check_layout(problem, strategy) if d.code.startswith("SW316")}


def test_what_is_proved_runs() -> None:
    pipeline = change(tensor=1, pipeline=2, data=4, gradient_accumulation_steps=4)
    partly = dataclasses.replace(PLAIN, activation_checkpointing=PartialCheckpointing(full=2))
    for strategy in (
        PLAIN,
        pipeline,
        partly,
        dataclasses.replace(PLAIN, activation_checkpointing="full"),
    ):
        assert not told(recipe_of(), strategy)
    assert not told(recipe_of(SMALL_GPT2), config=SMALL_GPT2)


@pytest.mark.parametrize(
    ("recipe", "graph", "words"),
    [
        (recipe_of(target="reference"), {}, "target: reference"),
        (recipe_of(), {"model_type": "mamba"}, "'mamba'"),
        (dataclasses.replace(recipe_of(), lora=ADAPTERS), {}, "LoRA"),
        (recipe_of(), {"attention": FLASH_ATTENTION_2}, FLASH_ATTENTION_2),
        (recipe_of(training={"precision": "fp16"}), {}, "fp16"),
    ],
)
def test_models_that_are_not_proved(recipe: Recipe, graph: dict[str, object], words: str) -> None:
    assert words in told(recipe, **graph)["SW3161"].message  # type: ignore[arg-type]


def test_dropout_is_not_proved() -> None:
    config: dict[str, JsonValue] = {**SMALL_GPT2, "resid_pdrop": 0.1}
    assert "dropout 0.1" in told(recipe_of(config), config=config)["SW3161"].message


@pytest.mark.parametrize(
    "key",
    [
        {"tensor": 2, "data": 4},
        {"context": 2, "data": 4},
        {"zero_stage": 3},
        {"activation_checkpointing": "selective"},
        {"offload": "optimizer"},
        {"schedule": "dualpipev", "pipeline": 2, "data": 4},
    ],
    ids=lambda key: next(iter(key)),
)
def test_layouts_that_are_not_proved(key: dict[str, object]) -> None:
    found = told(recipe_of(), dataclasses.replace(PLAIN, **key))["SW3162"]  # type: ignore[arg-type]
    assert found.key == ("parallelism", next(iter(key))) and found.message.endswith(
        f"{next(iter(key.values()))}"
    )
