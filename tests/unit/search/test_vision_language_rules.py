"""Models that see: SW3171 for each key that is not proved for them, SW3172 for what an estimate
leaves out."""

from __future__ import annotations

import dataclasses

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.rule_registry import check_layout
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import GOOD, change

PLAIN = change(tensor=1, pipeline=2, data=4, gradient_accumulation_steps=4)
IMAGE_TASKS = dataclasses.replace(graph_of(SMALL_LLAMA), task="image-text-to-text")


def keys(recipe: Recipe, strategy: Layout, graph: ModelGraph = IMAGE_TASKS) -> dict[str, str]:
    """Code -> the key that it names."""
    problem = Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster))
    return {d.code: ".".join(map(str, d.key or ())) for d in check_layout(problem, strategy)}


def test_what_is_proved_is_let_through_with_what_the_estimate_lacks() -> None:
    assert keys(recipe_of(), PLAIN) == {"SW3172": "model"}


def test_a_layout_that_is_not_proved_is_refused() -> None:
    strategy = dataclasses.replace(PLAIN, schedule="dualpipev")
    assert keys(recipe_of(), strategy)["SW3171"] == "parallelism.schedule"
    assert "SW3171" not in keys(recipe_of(), GOOD)  # tensor ranks are


def test_a_key_that_is_not_proved_is_refused() -> None:
    assert keys(recipe_of(training={"precision": "fp16"}), PLAIN)["SW3171"] == "training.precision"
    recipe = recipe_of()
    chunked = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, loss="chunked"))
    assert keys(chunked, PLAIN)["SW3171"] == "model.loss"
    assert keys(dataclasses.replace(recipe, target="megatron"), PLAIN)["SW3171"] == "target"


def test_modules_that_run_once_a_picture_are_refused_zero_3() -> None:
    """Ranks whose rows hold other numbers of pictures would gather a weight as many times."""
    often = dataclasses.replace(IMAGE_TASKS, modules_run_per_image=("model.visual.merger",))
    for graph, stage, refused in ((often, 3, True), (often, 2, False), (IMAGE_TASKS, 3, False)):
        strategy = dataclasses.replace(
            PLAIN, pipeline=1, data=8, zero_stage=stage, gradient_accumulation_steps=2
        )
        assert (
            keys(recipe_of(), strategy, graph).get("SW3171") == "parallelism.zero_stage"
        ) == refused, (stage, graph)
