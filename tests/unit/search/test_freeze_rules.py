"""`model.freeze`: SW1435 what names nothing, SW1436 nothing left, SW1437 beside LoRA; and which
parameters it names."""

from __future__ import annotations

import dataclasses

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph
from shardwright.models.trainable_parameters import (
    frozen_parameter_names,
    frozen_parameter_patterns,
)
from shardwright.recipe.recipe_types import LoraSection, Recipe
from shardwright.search.rule_registry import check_layout
from tests.unit.cost.test_vision import seeing
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

PLAIN = change(tensor=1, pipeline=2, data=4, gradient_accumulation_steps=4)


def frozen(*entries: str) -> Recipe:
    recipe = recipe_of()
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, freeze=entries))


def codes(recipe: Recipe, graph: ModelGraph) -> set[str]:
    problem = Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster))
    return {d.code for d in check_layout(problem, PLAIN) if d.code.startswith("SW143")}


def test_entries_that_name_nothing_are_refused() -> None:
    assert codes(frozen("vision"), graph_of(SMALL_LLAMA)) == {"SW1435"}
    assert codes(frozen("model.layer.0.*"), graph_of(SMALL_LLAMA)) == {"SW1435"}
    assert codes(frozen("vision", "model.layers.0.*"), seeing()) == set()


def test_something_must_be_left() -> None:
    assert codes(frozen("text"), graph_of(SMALL_LLAMA)) == {"SW1436"}
    assert codes(frozen("vision", "projector", "text"), seeing()) == {"SW1436"}
    assert codes(frozen("vision", "text"), seeing()) == set()


def test_lora_freezes_already() -> None:
    lora = LoraSection(rank=4, alpha=8, dropout=0.0, target_modules=None)
    one_stage = dataclasses.replace(PLAIN, pipeline=1, data=8, gradient_accumulation_steps=2)
    recipe = dataclasses.replace(frozen("model.layers.0.*"), lora=lora)
    problem = Problem(
        recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
    )
    assert "SW1437" in {d.code for d in check_layout(problem, one_stage)}


def test_parts_and_patterns() -> None:
    graph = seeing()
    vision = frozen_parameter_names(graph, ("vision",))
    assert "model.visual.patch.weight" in vision and "model.visual.merger.weight" not in vision
    assert frozen_parameter_names(graph, ("vision", "projector")) == frozen_parameter_names(
        graph, ("model.visual",)
    )
    every = {p.name for layer in graph.layers for p in layer.parameters}
    assert (
        frozen_parameter_names(graph, ("text",))
        | frozen_parameter_names(graph, ("model.visual.*",))
        == every
    )
    assert frozen_parameter_patterns(graph, ("vision",)) == (
        "model.visual.blocks.*.mlp.weight",
        "model.visual.patch.weight",
    )
    assert frozen_parameter_patterns(graph, ("model.visual.blocks.1",)) == (
        "model.visual.blocks.1.mlp.weight",
    )
    assert frozen_parameter_patterns(graph, ()) == ()


def test_a_tied_tensor_is_frozen_by_each_of_its_names() -> None:
    graph = graph_of({**SMALL_LLAMA, "tie_word_embeddings": True})
    assert set(frozen_parameter_patterns(graph, ("model.embed_tokens.weight",))) == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
