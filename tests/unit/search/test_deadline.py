"""`nodes: auto`: the fewest nodes that meet the deadline, found as one would by trying each
number."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.plan_sentences import (
    cluster_bound_text,
    larger_batch_text,
    smaller_cluster_batch_text,
)
from shardwright.search.cluster_sizing import (
    LARGER,
    ClusterSizing,
    SmallerClusterBatch,
    larger_batch,
    size_cluster,
    smaller_cluster_batch,
)
from shardwright.search.layout_search import search
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import LLAMA_8B, LLAMA_70B, graph_of, problem_of, recipe_of


def auto(config: dict[str, JsonValue], days: float, **training: object) -> Recipe:
    settings = {"sequence_length": 4096, "global_batch_size": 96, "steps": None, "tokens": 10**10}
    return recipe_of(
        config, cluster={"nodes": None}, training={**settings, "days_at_most": days, **training}
    )


def sized(recipe: Recipe, config: dict[str, JsonValue]) -> tuple[Recipe, ClusterSizing]:
    problem, sizing = size_cluster(problem_of(recipe, graph_of(config)))
    found = problem.recipe
    assert sizing is not None and problem.cluster.nodes == found.cluster.nodes == sizing.nodes
    return found, sizing


def days_on(recipe: Recipe, config: dict[str, JsonValue], nodes: int) -> float | None:
    there = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, nodes=nodes))
    ranked = search(problem_of(there, graph_of(config))).ranked
    return ranked[0].training.days if ranked else None


@pytest.mark.parametrize("days", [0.4, 1.0, 3.0, 9.0])
def test_every_smaller_cluster_misses_the_deadline(days: float) -> None:
    recipe = auto(LLAMA_8B, days)
    _, sizing = sized(recipe, LLAMA_8B)
    assert (
        days_on(recipe, LLAMA_8B, sizing.nodes) == pytest.approx(sizing.days)
        and sizing.days <= days
    )
    for nodes in range(1, sizing.nodes):
        found = days_on(recipe, LLAMA_8B, nodes)
        assert found is None or found > days, nodes


def test_it_says_what_bounds_it() -> None:
    _, by_time = sized(auto(LLAMA_8B, 1.0), LLAMA_8B)
    assert (
        by_time.smaller_days is not None
        and by_time.smaller_days > 1
        and "time bounds it" in cluster_bound_text(by_time)
    )
    _, by_memory = sized(auto(LLAMA_70B, 3000.0), LLAMA_70B)
    assert (
        by_memory.nodes > 1
        and by_memory.smaller_days is None
        and "memory bounds it" in cluster_bound_text(by_memory)
    )
    _, smallest = sized(auto(LLAMA_8B, 3000.0), LLAMA_8B)
    assert smallest.nodes == 1 and smallest.smaller_nodes is None


def test_a_deadline_that_nothing_meets() -> None:
    with pytest.raises(Refusal) as caught:
        sized(auto(LLAMA_8B, 0.01, global_batch_size=8), LLAMA_8B)
    (found,) = caught.value.diagnostics
    assert (
        found.code == "SW3204"
        and found.key == ("training", "days_at_most")
        and "The fastest has" in found.help
    )


def test_epochs_do_not_tell_the_steps() -> None:
    with pytest.raises(Refusal) as caught:
        sized(auto(LLAMA_8B, 1.0, tokens=None, epochs=1.0), LLAMA_8B)
    assert [d.code for d in caught.value.diagnostics] == ["SW3003"]


def test_a_number_of_nodes_stays() -> None:
    recipe = recipe_of()
    problem = problem_of(recipe, graph_of(dict(recipe.model.config or {})))
    assert size_cluster(problem) == (problem, None)


def batch_of(
    recipe: Recipe, config: dict[str, JsonValue]
) -> tuple[Recipe, ClusterSizing, SmallerClusterBatch | None]:
    found, sizing = sized(recipe, config)
    return found, sizing, smaller_cluster_batch(problem_of(found, graph_of(config)), sizing)


def test_a_batch_that_binds_is_named() -> None:
    """Of 8-GPU nodes a batch of 64 takes 8 whole ones or 4; 6 would be enough for a batch of 48."""
    recipe = auto(LLAMA_8B, 4.0, global_batch_size=64, tokens=3 * 10**10)
    days = {nodes: days_on(recipe, LLAMA_8B, nodes) for nodes in (4, 8)}
    assert days[4] is not None and days[8] is not None
    recipe = auto(LLAMA_8B, (days[4] + days[8]) / 2, global_batch_size=64, tokens=3 * 10**10)
    recipe = dataclasses.replace(
        recipe, cluster=dataclasses.replace(recipe.cluster, price_per_gpu_hour=2.0)
    )
    found, sizing, batch = batch_of(recipe, LLAMA_8B)
    assert batch is not None and batch.nodes < sizing.nodes and batch.days <= sizing.days_at_most
    assert (
        batch.global_batch_size % (batch.nodes * 8) == 0
        and batch.cost is not None
        and batch.cost_now is not None
    )
    # What it says is what a plan with that batch, on that cluster, over the same tokens says.
    changed = dataclasses.replace(found.training, global_batch_size=batch.global_batch_size)
    assert days_on(
        dataclasses.replace(found, training=changed), LLAMA_8B, batch.nodes
    ) == pytest.approx(batch.days)
    words = smaller_cluster_batch_text(batch, 64, sizing.nodes)
    assert (
        words.startswith("the batch of 64 bounds it") and f"{batch.cost:,.0f} instead of" in words
    )


def test_a_batch_that_does_not_bind_is_not() -> None:
    assert batch_of(auto(LLAMA_8B, 3000.0), LLAMA_8B)[2] is None


def test_what_a_larger_batch_gives() -> None:
    """Few micro-batches leave a step's collectives bare; many do not. Tokens stay the same."""
    gains = []
    for batch in (96, 768):
        recipe = auto(LLAMA_8B, 3000.0, global_batch_size=batch)
        wide = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, nodes=12))
        asked = problem_of(wide, graph_of(LLAMA_8B))
        days = search(asked).ranked[0].training.days
        sizing = ClusterSizing(
            nodes=12, days=days, days_at_most=3000.0, smaller_nodes=None, smaller_days=None
        )
        found = larger_batch(asked, sizing)
        assert found is not None and found.global_batch_size == LARGER * batch
        assert found.shorter == pytest.approx(1 - found.days / days)
        gains.append(found)
    assert gains[0].shorter > gains[1].shorter and gains[0].shorter > 0.02
    assert f"{gains[0].shorter:.0%} less" in larger_batch_text(gains[0])
    assert "would gain nothing" in larger_batch_text(dataclasses.replace(gains[1], shorter=-0.01))
