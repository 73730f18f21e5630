"""What contrastive training refuses, each with the key that it names: SW3181 ranks beyond data,
SW3182 accumulation, SW3183 keys that are not proved or say nothing there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.layout.axes import AXES, choices
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe, ValidationSection
from shardwright.search.rule_registry import check_layout
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

PAIRS = dataclasses.replace(graph_of(SMALL_LLAMA), task="contrastive")
BATCH = recipe_of().training.global_batch_size


def alone(**fields: Any) -> Layout:
    return change(
        **{
            "tensor": 1,
            "pipeline": 1,
            "data": 8,
            "zero_stage": 1,
            "micro_batch_size": BATCH // 8,
            "gradient_accumulation_steps": 1,
            "activation_checkpointing": "none",
            **fields,
        }
    )


def told(strategy: Layout, recipe: Recipe | None = None) -> dict[str, Diagnostic]:
    recipe = recipe or recipe_of()
    problem = Problem(recipe=recipe, graph=PAIRS, cluster=resolve_cluster(recipe.cluster))
    return {d.code: d for d in check_layout(problem, strategy)}


def test_data_ranks_with_one_micro_batch_are_let_through() -> None:
    for stage in range(4):
        assert not {"SW3181", "SW3182", "SW3183"} & told(alone(zero_stage=stage)).keys()


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "expert"])
def test_other_ranks_are_refused(axis: str) -> None:
    found = told(alone(**{axis: 2}))["SW3181"]
    assert (
        found.key == ("parallelism", axis) and found.severity == "error" and found.valid == ("1",)
    )


def test_two_micro_batches_are_two_losses() -> None:
    found = told(alone(micro_batch_size=BATCH // 16, gradient_accumulation_steps=2))["SW3182"]
    assert found.key == ("parallelism", "micro_batch_size") and found.valid == (str(BATCH // 8),)


def test_a_search_tries_the_one_micro_batch_that_there_is() -> None:
    recipe = recipe_of()
    micro = next(axis for axis in AXES if axis.name == "micro_batch_size")
    free = dataclasses.replace(
        recipe, parallelism=dataclasses.replace(recipe.parallelism, micro_batch_size=None)
    )
    problem = Problem(recipe=free, graph=PAIRS, cluster=resolve_cluster(recipe.cluster))
    assert choices(micro, problem, {"data": 4}) == (BATCH // 4,)


def test_what_says_nothing_of_pairs_is_refused() -> None:
    recipe = recipe_of()
    tokens = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, steps=None, tokens=10**9)
    )
    held_out = dataclasses.replace(
        recipe, validation=ValidationSection(every_steps=1, fraction=0.1, data=None)
    )
    for other, key in ((tokens, ("training", "tokens")), (held_out, ("validation",))):
        assert told(alone(), other)["SW3183"].key == key
    assert told(alone(activation_checkpointing="selective"))["SW3183"].key == (
        "parallelism",
        "activation_checkpointing",
    )
    assert told(alone(), dataclasses.replace(recipe, target="reference"))["SW3183"].key == (
        "target",
    )
