"""`nodes: auto`: the fewest nodes that meet the deadline, found as one would by trying each number."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cluster.resolve import resolve_cluster
from shardwright.diagnostics import Refusal
from shardwright.ir.json_value import JsonValue
from shardwright.ir.recipe import Recipe
from shardwright.search.deadline import Sizing, size_cluster
from shardwright.search.search import search
from tests.unit.model.factory import LLAMA_8B, LLAMA_70B, graph_of, recipe_of


def auto(config: dict[str, JsonValue], days: float, **training: object) -> Recipe:
    settings = {"sequence_length": 4096, "global_batch_size": 96, "steps": None, "tokens": 10**10}
    return recipe_of(config, cluster={"nodes": None}, training={**settings, "days_at_most": days, **training})


def sized(recipe: Recipe, config: dict[str, JsonValue]) -> tuple[Recipe, Sizing]:
    found, cluster, sizing = size_cluster(recipe, graph_of(config), resolve_cluster(recipe.cluster))
    assert sizing is not None and cluster.nodes == found.cluster.nodes == sizing.nodes
    return found, sizing


def days_on(recipe: Recipe, config: dict[str, JsonValue], nodes: int) -> float | None:
    there = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, nodes=nodes))
    ranked = search(there, graph_of(config), resolve_cluster(there.cluster)).ranked
    return ranked[0].training.days if ranked else None


@pytest.mark.parametrize("days", [0.4, 1.0, 3.0, 9.0])
def test_every_smaller_cluster_misses_the_deadline(days: float) -> None:
    recipe = auto(LLAMA_8B, days)
    _, sizing = sized(recipe, LLAMA_8B)
    assert days_on(recipe, LLAMA_8B, sizing.nodes) == pytest.approx(sizing.days) and sizing.days <= days
    for nodes in range(1, sizing.nodes):
        found = days_on(recipe, LLAMA_8B, nodes)
        assert found is None or found > days, nodes


def test_it_says_what_bounds_it() -> None:
    _, by_time = sized(auto(LLAMA_8B, 1.0), LLAMA_8B)
    assert by_time.smaller_days is not None and by_time.smaller_days > 1 and "time bounds it" in by_time.bound()
    _, by_memory = sized(auto(LLAMA_70B, 3000.0), LLAMA_70B)
    assert by_memory.nodes > 1 and by_memory.smaller_days is None and "memory bounds it" in by_memory.bound()
    _, smallest = sized(auto(LLAMA_8B, 3000.0), LLAMA_8B)
    assert smallest.nodes == 1 and smallest.smaller_nodes is None


def test_a_deadline_that_nothing_meets() -> None:
    with pytest.raises(Refusal) as caught:
        sized(auto(LLAMA_8B, 0.01, global_batch_size=8), LLAMA_8B)
    (found,) = caught.value.diagnostics
    assert found.code == "SW3204" and found.key == ("training", "days_at_most") and "The fastest has" in found.help


def test_epochs_do_not_tell_the_steps() -> None:
    with pytest.raises(Refusal) as caught:
        sized(auto(LLAMA_8B, 1.0, tokens=None, epochs=1.0), LLAMA_8B)
    assert [d.code for d in caught.value.diagnostics] == ["SW3003"]


def test_a_number_of_nodes_stays() -> None:
    recipe = recipe_of()
    cluster = resolve_cluster(recipe.cluster)
    assert size_cluster(recipe, graph_of(dict(recipe.model.config or {})), cluster) == (recipe, cluster, None)
