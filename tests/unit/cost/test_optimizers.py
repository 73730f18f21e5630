"""Optimizers in the estimate: their states' bytes and their traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.layout.layout_estimate import Estimate
from shardwright.search.layout_resolution import estimate_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

GRAPH = graph_of(LLAMA_8B)


def estimate(name: str, **layout: Any) -> Estimate:
    recipe = recipe_of(LLAMA_8B)
    optimizer = replace(recipe.training.optimizer, name=name)
    recipe = replace(recipe, training=replace(recipe.training, optimizer=optimizer))
    degrees = {"tensor": 1, "pipeline": 1, "data": 8, "gradient_accumulation_steps": 2} | layout
    return estimate_layout(problem_of(recipe, GRAPH), change(**degrees))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_lion_has_one_moment(zero_stage: int) -> None:
    adamw, lion = (estimate(name, zero_stage=zero_stage) for name in ("adamw", "lion"))
    [of_adamw], [of_lion] = adamw.memory.stages, lion.memory.stages
    saved = of_adamw.optimizer_bytes - of_lion.optimizer_bytes
    assert saved == pytest.approx(4 * GRAPH.total_parameters / 8)
    assert of_adamw.gradients_bytes == of_lion.gradients_bytes
    assert lion.time.optimizer_seconds < adamw.time.optimizer_seconds
