"""The search finds what an exhaustive one finds: on random small problems, every legal layout is
placed exactly and priced, partial checkpointing included."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shardwright.cost.layout_costs import price
from shardwright.cost.peak_memory import memory_is_accepted
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import resolve_layout, with_partial_checkpointing
from shardwright.search.layout_search import best_layout, rank_key, search
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.ranking_penalties import penalized_seconds
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

DENSE: dict[str, JsonValue] = {**LLAMA_8B, "num_hidden_layers": 9}
EXPERTS: dict[str, JsonValue] = {
    **LLAMA_8B,
    "model_type": "mixtral",
    "num_hidden_layers": 6,
    "intermediate_size": 3584,
    "num_local_experts": 8,
}
OPEN: dict[str, object] = dict.fromkeys(
    ("context", "expert", "virtual_stages", "sequence_parallel")
)
SEEDS = range(12)


def random_problem(seed: int) -> Problem:
    """Return a problem whose GPUs often have too little memory for the fastest layouts."""
    rng = random.Random(seed)
    config = rng.choice((DENSE, DENSE, EXPERTS))
    pins: dict[str, object] = dict(OPEN)
    if rng.random() < 0.25:
        pins |= {"schedule": "dualpipev", "pipeline": rng.choice((2, 4))}
    elif rng.random() < 0.5:
        pins["pipeline"] = rng.choice((2, 4))
    recipe = recipe_of(
        config,
        target=rng.choice(("deepspeed", "megatron")) if "schedule" not in pins else "deepspeed",
        objective=rng.choice(("throughput", "throughput", "memory", "cost")),
        cluster={"gpus_per_node": rng.choice((4, 8))},
        training={
            "global_batch_size": rng.choice((16, 24, 32)),
            "sequence_length": rng.choice((2048, 4096)),
        },
        parallelism=pins,
    )
    problem = problem_of(recipe, graph_of(config))
    gpu = dataclasses.replace(problem.cluster.gpu, memory_gib=rng.choice((16, 20, 24, 32, 48, 80)))
    return dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, gpu=gpu))


def exhaustive_best(problem: Problem) -> Estimate | None:
    """Return the best of all legal layouts that fit; None where none does."""
    found = []
    for strategy in candidate_layouts(problem):
        diagnostics = check_layout(problem, strategy)
        if any(d.severity == "error" for d in diagnostics):
            continue
        layout, memory = resolve_layout(problem, strategy)
        if memory_is_accepted(problem.recipe, memory):
            found.append(price(layout, memory, diagnostics))
            partial = with_partial_checkpointing(problem, layout, memory)
            found += [price(*partial, diagnostics)] if partial else []
    return min(found, key=lambda e: rank_key(problem.recipe, e), default=None)


def goal(recipe: Recipe, estimate: Estimate) -> float:
    if recipe.objective == "memory":
        return estimate.memory.peak_bytes
    return penalized_seconds(recipe, estimate)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_layout_is_that_of_an_exhaustive_search(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 0)
    problem = random_problem(seed)
    ranked, best = search(problem).ranked, exhaustive_best(problem)
    assert (best is None) == (not ranked)
    assert best_layout(problem) == next(iter(ranked), None)
    if best is not None:
        limit = goal(problem.recipe, best) * 1.001
        assert goal(problem.recipe, ranked[0]) <= limit, (
            ranked[0].strategy.describe(),
            best.strategy.describe(),
        )
