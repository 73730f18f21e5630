"""What memory makes of a pipeline before its layers are placed: no layout that fits takes less than
the bound says, and what it says has no room has none. Models whose layers are alike, and one whose
first layer is another."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.search.layers_that_fit import seconds_by_layer_count, shortest, slowest_rank
from shardwright.search.layout_resolution import price_planned_layout, resolve_layout
from shardwright.search.layout_search import NEARLY_FITS_FACTOR, search
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.over_memory_layouts import NEXT_GPU_MEMORY_FACTOR
from shardwright.search.step_time_bound import StepTimeBound
from tests.unit.models.factory import LLAMA_70B, graph_of, model_section, problem_of, recipe_of

FIRST_IS_DENSE = "deepseek-ai/DeepSeek-V2-Lite"


def asked(name: str, *, nodes: int, batch: int, gpu: str, **more: Any) -> Problem:
    config = LLAMA_70B if name == "llama-70b" else None
    graph = build_model_graph(model_section(source=name)) if config is None else graph_of(config)
    recipe = recipe_of(
        config,
        cluster={"nodes": nodes, "gpu": gpu},
        training={"global_batch_size": batch, "sequence_length": 4096},
        **more,
    )
    return problem_of(recipe, graph)


CASES = [
    ("llama-70b", 4, 96, "a100-sxm4-80gb", "deepspeed"),
    ("llama-70b", 4, 64, "a100-sxm4-80gb", "megatron"),
    (FIRST_IS_DENSE, 2, 64, "a100-sxm4-40gb", "deepspeed"),
    (FIRST_IS_DENSE, 2, 64, "a100-sxm4-40gb", "megatron"),
]


@pytest.mark.parametrize(("name", "nodes", "batch", "gpu", "target"), CASES)
def test_none_is_faster_and_none_fits_without_room(
    name: str, nodes: int, batch: int, gpu: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    problem = asked(name, nodes=nodes, batch=batch, gpu=gpu, target=target)
    bound, gains = StepTimeBound(problem), []
    for e in search(problem).ranked:
        s, partial = (
            e.strategy,
            isinstance(e.strategy.activation_checkpointing, PartialCheckpointing),
        )
        if s.loss == "chunked":
            s = dataclasses.replace(
                s, loss="full"
            )  # as the search has it before it settles the loss
        if partial:
            s = dataclasses.replace(s, activation_checkpointing="full", hpz_partition_size=1)
        assert bound.tight_least_seconds(
            s, allows_partial_checkpointing=partial
        ) <= e.time.step_seconds * (1 + 1e-9), e.strategy
        gains.append(bound.tight_least_seconds(s) / bound.least_seconds(s))
        layout, _ = price_planned_layout(problem, e.strategy, e.boundaries)
        assign_stages = bound.least_interleaved_step_seconds(layout)
        assert (
            assign_stages <= e.time.step_seconds * (1 + 1e-9)
            and (assign_stages > 0) == e.strategy.is_interleaved
        ), e.strategy
    assert max(gains) > 1.05
    crowded = [
        s for s in candidate_layouts(problem) if s.zero_stage <= 1 and not bound.layers_may_fit(s)
    ]
    assert crowded
    assert not any(
        resolve_layout(problem, s)[1].fits for s in crowded[:: max(1, len(crowded) // 40)]
    )


@pytest.mark.parametrize(("name", "nodes", "batch", "gpu", "target"), CASES)
def test_the_fastest_beyond_memory_is_the_fastest_of_all_that_are(
    name: str, nodes: int, batch: int, gpu: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = asked(name, nodes=nodes, batch=batch, gpu=gpu, target=target)
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    complete = search(problem)
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 0)
    pruned = search(dataclasses.replace(problem))
    step = complete.ranked[0].time.step_seconds
    for times, share in itertools.product(
        (NEARLY_FITS_FACTOR, NEXT_GPU_MEMORY_FACTOR), (0.8, 0.95, 1.5)
    ):
        found, same = (each.over_memory.fastest(times, share * step) for each in (complete, pruned))
        assert (found is None) == (same is None)
        if found is not None and same is not None:
            assert found == same and found.time.step_seconds < share * step
            assert found.memory.peak_bytes <= times * problem.cluster.capacity_bytes


def test_rows_of_layers_that_differ() -> None:
    each = np.array([5.0, 1, 3, 1])
    assert shortest(each, None, has_consecutive_layers=True).tolist() == [0, 1, 4, 5, 10]
    assert shortest(np.array([2.0, 2, 2]), None, has_consecutive_layers=True).tolist() == [
        0,
        2,
        4,
        6,
    ]
    assert shortest(each, None, has_consecutive_layers=False).tolist() == [0, 1, 2, 5, 10]
    assert shortest(each, each < 5, has_consecutive_layers=True).tolist() == [0, 1, 2, 5]


def test_the_slowest_rank_is_one_that_has_room() -> None:
    """Eight layers of a second each and a head of three: three layers on two ranks, two on the
    third, the head alone on the last take 3. Where the first two have room for one each, the others
    share six layers and the head: 5."""
    problem = asked("llama-70b", nodes=1, batch=8, gpu="h100-sxm-80gb")
    found = seconds_by_layer_count(_passes(problem), None, has_consecutive_layers=True)
    work = dataclasses.replace(found, least=np.arange(9.0), most=np.arange(9.0), head=3.0)
    assert slowest_rank(work, np.array([8, 8, 8, 8]), 3) == (3.0, 0)
    assert slowest_rank(work, np.array([1, 1, 8, 8]), 3) == (5.0, 2)
    assert slowest_rank(work, np.array([1, 1, 2, 8]), 3) == (7.0, 3)
    assert slowest_rank(work, np.array([1, 1, 2, 3]), 3) is None


def _passes(problem: Problem) -> Any:
    from shardwright.cost.calibrated_costs import calibrated_constants
    from shardwright.cost.layer_times import pass_times
    from shardwright.cost.priced_layout import build_priced_layout

    return pass_times(
        build_priced_layout(
            problem, next(iter(candidate_layouts(problem))), calibrated_constants(problem.recipe)
        )
    )
