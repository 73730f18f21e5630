"""Preference objectives: what they are not verified with, and engines without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.engines.engine_table import ENGINES
from shardwright.recipe.objectives import OBJECTIVES, ObjectiveSection
from shardwright.recipe.recipe_types import NoiseScaleSection, Recipe
from shardwright.search.training_rules import engine_recipe_errors
from tests.unit.models.factory import SMALL_LLAMA, recipe_of
from tests.unit.search.test_noise_scale_rules import found

PREFERENCES = [name for name, traits in OBJECTIVES.items() if traits.reads_preferences]


def with_objective(name: str) -> Recipe:
    recipe = recipe_of(SMALL_LLAMA)
    defaults: dict[str, Any] = dict(OBJECTIVES[name].defaults)
    objective = ObjectiveSection(name=name, **defaults)
    return replace(recipe, training=replace(recipe.training, objective=objective))


@pytest.mark.parametrize("name", PREFERENCES)
def test_unverified_settings_are_refused(name: str) -> None:
    recipe = with_objective(name)
    assert "SW3234" not in found(recipe, SMALL_LLAMA)
    assert recipe.tracking is not None
    noise = replace(recipe.tracking, noise_scale=NoiseScaleSection(every_steps=10, rows=4))
    refused = found(replace(recipe, tracking=noise), SMALL_LLAMA)["SW3234"]
    assert refused.key == ("tracking", "noise_scale") and name in refused.message
    islands = replace(recipe.cluster, islands=2, inter_island_gbits_per_second=1.0)
    assert found(replace(recipe, cluster=islands), SMALL_LLAMA)["SW3234"].key == (
        "cluster",
        "islands",
    )


@pytest.mark.parametrize("name", PREFERENCES)
def test_megatron_names_what_runs(name: str) -> None:
    recipe = replace(with_objective(name), target="megatron")
    errors = engine_recipe_errors(ENGINES["megatron"], recipe)
    [error] = [e for e in errors if e.key == ("training", "objective", "name")]
    assert error.code == "SW1922" and name in error.message
    assert "target: deepspeed" in str(error.help) and error.valid == ("next-token",)


def test_a_reward_model_has_no_chunked_loss() -> None:
    recipe = with_objective("reward")
    changed = replace(recipe, model=replace(recipe.model, loss="chunked"))
    refused = found(changed, SMALL_LLAMA)["SW3234"]
    assert refused.key == ("model", "loss") and "reward" in refused.message
    dpo = replace(changed, training=with_objective("dpo").training)
    assert "SW3234" not in found(dpo, SMALL_LLAMA)
