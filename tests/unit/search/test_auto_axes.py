"""`expert: auto` and `context: auto`: what the search tries, and where it leaves them at 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.layout.axes import (
    MAX_EXPERT_RANKS,
    MAX_TENSOR_RANKS,
    expert_degrees,
    tensor_degrees,
)
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_resolution import estimate_layout
from shardwright.search.layout_search import search
from shardwright.search.legal_layouts import candidate_layouts, zero_baseline
from shardwright.search.plan_explanation import pinned_keys
from shardwright.search.step_time_bound import StepTimeBound
from shardwright.utils.divisors import MIN_TOKENS_PER_CONTEXT_RANK, context_degrees
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of
from tests.unit.search.test_expert_rules import MIXTURE

LARGE: dict[str, JsonValue] = {
    **MIXTURE,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_local_experts": 32,
    "num_hidden_layers": 8,
}
PINS: dict[str, Any] = {"tensor": 1, "pipeline": 1}


def problem(config: dict[str, JsonValue], length: int = 128, **pins: Any) -> Problem:
    cluster = {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    training = {"sequence_length": length, "global_batch_size": 64}
    recipe = recipe_of(config, cluster=cluster, training=training, parallelism=pins)
    return problem_of(recipe, graph_of(config))


def tried(found: Problem, axis: str) -> set[int]:
    return {getattr(s, axis) for s in candidate_layouts(found)}


def test_experts_that_divide_the_experts_and_the_ranks() -> None:
    assert expert_degrees(graph_of(MIXTURE), 16) == (1, 2)
    assert expert_degrees(graph_of(LARGE), 16) == (1, 2, 4, 8, 16)
    assert expert_degrees(graph_of(SMALL_LLAMA), 16) == (1,)
    many = graph_of({**MIXTURE, "num_local_experts": 2 * MAX_EXPERT_RANKS})
    assert max(expert_degrees(many, 1024)) == MAX_EXPERT_RANKS


def test_auto_tries_them() -> None:
    assert tried(problem(LARGE, **PINS), "expert") == {1, 2, 4, 8, 16}
    assert tried(problem(LARGE, **PINS, expert=1), "expert") == {1}
    assert tried(problem(SMALL_LLAMA, **PINS), "expert") == {1}


def test_rows_are_cut_where_each_rank_keeps_a_long_piece() -> None:
    assert tried(problem(SMALL_LLAMA, **PINS), "context") == {1}
    assert tried(
        problem(SMALL_LLAMA, length=4 * MIN_TOKENS_PER_CONTEXT_RANK, **PINS), "context"
    ) == {1, 2, 4}
    assert tried(
        problem(SMALL_LLAMA, length=4 * MIN_TOKENS_PER_CONTEXT_RANK, **PINS, context=8), "context"
    ) == {8}
    assert context_degrees(3 * MIN_TOKENS_PER_CONTEXT_RANK, 8) == (1, 2)
    assert context_degrees(100, 8) == (1,)


def test_a_tensor_group_fills_an_nvlink_domain() -> None:
    def degrees(axis: str, domain: int | None, length: int = 128) -> set[int]:
        cluster = {"nodes": 8, "gpus_per_node": 1, "nvlink_domain_gpus": domain}
        training = {"sequence_length": length, "global_batch_size": 64}
        recipe = recipe_of(SMALL_LLAMA, cluster=cluster, training=training)
        return tried(problem_of(recipe, graph_of(SMALL_LLAMA)), axis)

    assert degrees("tensor", None) == {1} and degrees("tensor", 4) == {1, 2, 4}
    wide = resolve_cluster(recipe_of(cluster={"nodes": 64, "nvlink_domain_gpus": 64}).cluster)
    assert tensor_degrees(wide) == (1, 2, 4, 8, MAX_TENSOR_RANKS)
    long = 8 * MIN_TOKENS_PER_CONTEXT_RANK
    assert degrees("context", None, long) == {1} and degrees("context", 4, long) == {1, 2, 4}


def test_pins_that_fill_the_world_leave_them_plain() -> None:
    filled = problem(LARGE, **PINS, data=16, expert=None, context=None)
    assert tried(filled, "expert") == tried(filled, "context") == {1}


def test_what_one_runs_today_has_neither() -> None:
    today = zero_baseline(
        problem(LARGE, expert=None, context=None).recipe, zero_stage=3
    ).parallelism
    assert today.expert == today.context == 1


def test_the_bound_is_one_for_each_degree() -> None:
    """A layout is left out for what it takes itself, never for what its neighbour takes."""
    asked = problem(
        LARGE,
        **PINS,
        zero_stage=1,
        micro_batch_size=1,
        activation_checkpointing="none",
        expert=None,
    )
    bound = StepTimeBound(asked)
    layouts = [s for s in candidate_layouts(asked) if s.schedule == "1f1b" and s.data == 16]
    assert {s.expert for s in layouts} == {1, 2, 4, 8, 16}
    for s in layouts:
        assert bound.least_seconds(s) <= estimate_layout(asked, s).time.step_seconds
        assert bound.least_seconds(s) == pytest.approx(StepTimeBound(asked).least_seconds(s))


def test_the_search_takes_experts_where_they_pay() -> None:
    """At ZeRO-3 every micro-batch gathers all experts over the links between nodes; spread out they
    stay."""
    asked = problem(LARGE, **PINS, zero_stage=3, micro_batch_size=1, expert=None)
    slow = replace(asked, cluster=replace(asked.cluster, inter_node_bytes_per_second=1e9))
    assert search(slow).ranked[0].strategy.expert > 1
    assert "expert" not in pinned_keys(asked.recipe)
