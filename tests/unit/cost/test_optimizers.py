"""Optimizers in the estimate: their states' bytes and their traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.cost.goodput import node_checkpoint_bytes
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.optimizer_matrices import factor_elements, matrix_parameters
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import estimate_layout, price_planned_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

GRAPH = graph_of(LLAMA_8B)


def recipe_with(name: str) -> Recipe:
    recipe = recipe_of(LLAMA_8B)
    optimizer = replace(recipe.training.optimizer, name=name)
    return replace(recipe, training=replace(recipe.training, optimizer=optimizer))


def estimate(name: str, **layout: Any) -> Estimate:
    degrees = {"tensor": 1, "pipeline": 1, "data": 8, "gradient_accumulation_steps": 2} | layout
    return estimate_layout(problem_of(recipe_with(name), GRAPH), change(**degrees))


def checkpoint_bytes(name: str) -> float:
    layout = change(tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2)
    problem = problem_of(recipe_with(name), GRAPH)
    return sum(
        node_checkpoint_bytes(price_planned_layout(problem, layout, (0, len(GRAPH.layers)))[0])
    )


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_lion_has_one_moment(zero_stage: int) -> None:
    adamw, lion = (estimate(name, zero_stage=zero_stage) for name in ("adamw", "lion"))
    [of_adamw], [of_lion] = adamw.memory.stages, lion.memory.stages
    saved = of_adamw.optimizer_bytes - of_lion.optimizer_bytes
    assert saved == pytest.approx(4 * GRAPH.total_parameters / 8)
    assert of_adamw.gradients_bytes == of_lion.gradients_bytes
    assert lion.time.optimizer_seconds < adamw.time.optimizer_seconds
    assert checkpoint_bytes("lion") == pytest.approx(8 * GRAPH.total_parameters)


LAYER_FACTORS = 4 * 4096 + 2 * (1024 + 4096) + 3 * (14336 + 4096)
FACTORS = 32 * LAYER_FACTORS + 2 * (128256 + 4096)
VECTORS = (2 * 32 + 1) * 4096


def test_matrices_are_those_of_two_dimensions() -> None:
    found = matrix_parameters("adafactor", GRAPH, ())
    assert sum(map(factor_elements, found)) == FACTORS
    assert sum(p.numel for p in found) == GRAPH.total_parameters - VECTORS
    frozen = matrix_parameters("adafactor", GRAPH, ("model.layers.0",))
    assert sum(map(factor_elements, found)) - sum(map(factor_elements, frozen)) == LAYER_FACTORS
    assert not matrix_parameters("lion", GRAPH, ())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_adafactor_has_rows_and_columns_on_every_rank(zero_stage: int, pipeline: int) -> None:
    if pipeline > 1 and zero_stage > 1:
        return
    degrees = {
        "pipeline": pipeline,
        "data": 8 // pipeline,
        "zero_stage": zero_stage,
        "gradient_accumulation_steps": 2 * pipeline,
    }
    adamw, adafactor = (estimate(name, **degrees) for name in ("adamw", "adafactor"))
    of_adamw, of_adafactor = (
        sum(stage.optimizer_bytes for stage in each.memory.stages) for each in (adamw, adafactor)
    )
    sharded = 4 * (GRAPH.total_parameters + VECTORS) / (8 // pipeline)
    assert of_adafactor == pytest.approx(sharded + 4 * FACTORS)
    assert of_adamw - of_adafactor > 0.6 * of_adamw
    assert adafactor.time.optimizer_seconds > adamw.time.optimizer_seconds


def test_adafactors_checkpoint_has_them_once() -> None:
    assert checkpoint_bytes("adafactor") == pytest.approx(
        4 * (GRAPH.total_parameters + VECTORS + FACTORS)
    )


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_8_bit_moments_have_a_byte_and_a_scale(zero_stage: int) -> None:
    adamw, small = (estimate(name, zero_stage=zero_stage) for name in ("adamw", "adamw_8bit"))
    [of_adamw], [of_small] = adamw.memory.stages, small.memory.stages
    each = 4 + 2 * (1 + 4 / 256)  # every parameter has a multiple of 256 elements
    assert of_small.optimizer_bytes == pytest.approx(each * GRAPH.total_parameters / 8)
    assert of_adamw.gradients_bytes == of_small.gradients_bytes
    assert checkpoint_bytes("adamw_8bit") == pytest.approx(each * GRAPH.total_parameters)
    assert small.time.optimizer_seconds > adamw.time.optimizer_seconds
