"""`parallelism.expert_tensor: auto` under target: megatron: the search settles whether tensor ranks
cut experts or hold whole ones, and answers for the other choice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.engines.engine_table import ENGINES, recipe_for_engine
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_search import search
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.step_time_bound import StepTimeBound
from tests.conftest import SMALL_RECIPE
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of

MIXTRAL = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 8}
OSS = {**MIXTRAL, "model_type": "gpt_oss", "num_experts_per_tok": 2, "head_dim": 16}
"""Its experts have biases."""
OPEN: dict[str, object] = {
    "expert_tensor": None,
    "sequence_parallel": None,
    "zero_stage": 1,
    "pipeline": 1,
}


def problem_with(config: dict[str, Any], target: str = "megatron", **pins: object) -> Problem:
    recipe = dataclasses.replace(recipe_of(config, parallelism={**OPEN, **pins}), target=target)
    return problem_of(recipe, graph_of(config))


def kinds(strategies: list[Layout]) -> set[tuple[int, int | str]]:
    return {(s.tensor, s.expert_tensor) for s in strategies}


def test_both_are_tried_where_there_are_experts_to_cut() -> None:
    assert kinds([*candidate_layouts(problem_with(MIXTRAL))]) >= {
        (1, "tensor"),
        (2, "tensor"),
        (2, 1),
        (4, "tensor"),
        (4, 1),
    }
    assert (1, 1) not in kinds([*candidate_layouts(problem_with(MIXTRAL))])  # the same layout twice
    assert {cut for _, cut in kinds([*candidate_layouts(problem_with(SMALL_LLAMA))])} == {"tensor"}
    assert {cut for _, cut in kinds([*candidate_layouts(problem_with(MIXTRAL, "deepspeed"))])} == {
        "tensor"
    }
    for pin in "tensor", 1:
        assert {
            s.expert_tensor for s in candidate_layouts(problem_with(MIXTRAL, expert_tensor=pin))
        } == {pin}


def test_whole_experts_go_over_tensor_ranks_too() -> None:
    """Eight experts on eight ranks: tensor 2 x data 4, one each; experts that tensor ranks cut go
    over data ranks."""
    problem = problem_with(MIXTRAL, tensor=2)
    ranked = [e.strategy for e in search(problem).ranked]
    most = {cut: max(s.expert for s in ranked if s.expert_tensor == cut) for cut in ("tensor", 1)}
    assert most == {"tensor": 4, 1: 8}
    assert {
        s.expert for s in candidate_layouts(problem_with(MIXTRAL, tensor=2, expert_tensor="tensor"))
    } == {1, 2, 4}


def test_experts_with_biases_leave_tensor_ranks_to_attention() -> None:
    """Cut, they are refused over tensor ranks (SW3166); whole they run."""
    ranked = kinds([e.strategy for e in search(problem_with(OSS)).ranked])
    assert {tensor for tensor, cut in ranked if cut == "tensor"} == {1} and (2, 1) in ranked
    pinned = kinds([e.strategy for e in search(problem_with(OSS, expert_tensor="tensor")).ranked])
    assert {tensor for tensor, _ in pinned} == {1}


def test_no_layout_takes_less_than_its_bound() -> None:
    problem = problem_with(MIXTRAL, pipeline=None, activation_checkpointing="none")
    bound, seen = StepTimeBound(problem), set()
    for e in search(problem).ranked:
        seen.add(e.strategy.expert_tensor)
        assert bound.least_seconds(e.strategy) <= e.time.step_seconds, e.strategy
    assert seen == {"tensor", 1}


def test_target_auto_leaves_it_to_the_search() -> None:
    """A recipe for any engine does not speak of it."""
    recipe = dataclasses.replace(recipe_of(MIXTRAL), target="auto")
    assert recipe_for_engine(recipe, ENGINES["megatron"]).parallelism.expert_tensor is None
    assert recipe_for_engine(recipe, ENGINES["deepspeed"]).parallelism.expert_tensor == "tensor"
    assert recipe_of(MIXTRAL).parallelism.expert_tensor == "tensor"


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        (MIXTRAL, "expert_tensor=1,tensor=2", {"loses", "wins", "chosen"}),
        (MIXTRAL, "expert_tensor=3,tensor=2", {"forbidden"}),
        (SMALL_LLAMA, "expert_tensor=1,tensor=2", {"forbidden"}),
    ],
)
def test_it_answers_for_the_other_choice(
    config: dict[str, Any],
    asked: str,
    said: set[str],
    write_recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {
        "target": "megatron",
        "model.config": config,
        "cluster": {
            **SMALL_RECIPE["cluster"],
            "nodes": 1,
            "gpus_per_node": 8,
            "gpu": "h100-sxm-80gb",
        },
    }
    path = write_recipe(
        {**changes, "parallelism": {"sequence_parallel": "auto", "expert_tensor": "auto"}}
    )
    assert load_recipe(path).parallelism.expert_tensor is None
    assert main(["explain", str(path), "--why-not", asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] in said, answer
