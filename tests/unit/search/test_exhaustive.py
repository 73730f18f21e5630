"""The pruned search against plain enumeration, what its rules read, and what a ranking says beyond
its first row."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Candidate
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import CHECKPOINTING, Objective, PartialCheckpointing
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.plan_sentences import slowdown_reason, slowdown_text
from shardwright.search.layout_comparison import pareto_front, slower_regions
from shardwright.search.layout_resolution import estimate_checked_layout, estimate_layout
from shardwright.search.layout_search import rank_key, search
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.ranking_penalties import penalized_seconds, with_complexity_penalty
from shardwright.search.rule_registry import check_layout, rules_for
from shardwright.search.step_time_bound import PRICED_FACTOR, StepTimeBound
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    SMALL_GPT2,
    SMALL_LLAMA,
    graph_of,
    problem_of,
    recipe_of,
)

GPT3: dict[str, JsonValue] = {"model_type": "gpt2", "vocab_size": 51200, "n_positions": 2048}
GPT3 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT_175B = {**GPT3, "n_embd": 12288, "n_layer": 96, "n_head": 96}
GPT_1T = {**GPT3, "n_embd": 25600, "n_layer": 128, "n_head": 160}


def every(recipe: Recipe, config: dict[str, JsonValue]) -> list[Estimate]:
    """All that is feasible, priced one by one, best first."""
    graph, cluster = graph_of(config), resolve_cluster(recipe.cluster)
    checked = [
        (s, check_layout(Problem(recipe=recipe, graph=graph, cluster=cluster), s))
        for s in candidate_layouts(problem_of(recipe, graph, cluster))
    ]
    legal = [(s, found) for s, found in checked if all(d.severity != "error" for d in found)]
    priced = [
        estimate_checked_layout(problem_of(recipe, graph, cluster), s, found) for s, found in legal
    ]
    feasible = [e for e in priced if e.feasible]
    return sorted(feasible, key=lambda e: rank_key(recipe, e))


@pytest.mark.parametrize("objective", ["throughput", "memory", "cost"])
@pytest.mark.parametrize(
    ("config", "nodes", "batch"),
    [
        (SMALL_LLAMA, 1, 16),
        (SMALL_GPT2, 3, 24),
        (LLAMA_8B, 2, 32),
        pytest.param(LLAMA_8B, 1, 48, marks=pytest.mark.prove),
        pytest.param(LLAMA_70B, 8, 96, marks=pytest.mark.prove),
    ],
)
def test_it_finds_what_enumeration_finds(
    config: dict[str, JsonValue],
    nodes: int,
    batch: int,
    objective: Objective,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    recipe = recipe_of(
        config, cluster={"nodes": nodes}, training={"global_batch_size": batch}, objective=objective
    )
    result = search(problem_of(recipe, graph_of(config)))
    # How many layers to recompute is no axis: tests/unit/search/test_partial_checkpointing.py.
    tried = [e for e in result.ranked if e.strategy.activation_checkpointing in CHECKPOINTING]
    assert tried == every(recipe, config)


def test_what_is_not_priced_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a search's layouts, priced: none is faster than its bound, and the best one is the
    same."""
    recipe = recipe_of(LLAMA_70B, cluster={"nodes": 8}, training={"global_batch_size": 96})
    asked = problem_of(recipe, graph_of(LLAMA_70B))
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    complete = search(asked)
    assert not complete.skipped
    bound = StepTimeBound(asked)
    for e in complete.ranked:
        s = e.strategy
        if isinstance(s.activation_checkpointing, PartialCheckpointing):
            s = dataclasses.replace(s, activation_checkpointing="none")
        assert bound.least_seconds(s) <= e.time.step_seconds * (1 + 1e-9), s
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 0)
    pruned = search(dataclasses.replace(asked))
    best = pruned.ranked[0]
    assert best == complete.ranked[0] and pruned.skipped
    limit = PRICED_FACTOR * penalized_seconds(recipe, best)
    assert all(
        least > best.time.step_seconds and with_complexity_penalty(s, least) > limit
        for least, s in pruned.skipped
    )
    assert all(e in complete.ranked for e in pruned.ranked)
    lost = {region.where: region.slower for region in slower_regions(recipe, complete.ranked)}
    told = slower_regions(recipe, pruned.ranked, pruned.skipped)
    assert told and all(lost[r.where] >= r.nearest * (1 - 1e-9) for r in told)
    assert all(lost[r.where] == r.slower for r in told if r.at_least is None)
    bounded = dataclasses.replace(told[0], at_least=told[0].slower / 2)
    assert slowdown_text(bounded) == f">={told[0].slower / 2:+.1%}"
    assert slowdown_reason(bounded) == f"best priced {told[0].slower:+.1%}, {told[0].because}"
    near = {e.strategy for e in complete.ranked if penalized_seconds(recipe, e) <= limit}
    near |= {e.strategy for e in complete.ranked if e.time.step_seconds <= best.time.step_seconds}
    left_out = near - {e.strategy for e in pruned.ranked}
    assert all(isinstance(s.activation_checkpointing, PartialCheckpointing) for s in left_out)


def test_a_rule_reads_what_it_says() -> None:
    """Layouts that agree on those keys break it alike, or not at all."""
    told: dict[tuple[str, int, tuple[object, ...]], bool] = {}
    recipes = [
        recipe_of(
            SMALL_LLAMA,
            cluster={"nodes": 2, "gpus_per_node": 6},
            training={"global_batch_size": 48},
        ),
        recipe_of(SMALL_GPT2, training={"gradient_accumulation_dtype": "bf16"}),
        recipe_of(
            {"model_type": "opt", "num_hidden_layers": 4, "layerdrop": 0.1, "hidden_size": 96}
        ),
    ]
    layouts = 0
    for place, recipe in enumerate(recipes):
        assert recipe.model.config is not None
        graph, cluster = graph_of(dict(recipe.model.config)), resolve_cluster(recipe.cluster)
        for strategy in candidate_layouts(problem_of(recipe, graph, cluster)):
            layouts += 1
            subject = Candidate(recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)
            for code, rule in rules_for("deepspeed").items():
                key = (code, place, tuple(getattr(strategy, name) for name in sorted(rule.reads)))
                broken = rule.check(subject) is not None
                assert told.setdefault(key, broken) == broken, (code, strategy)
    assert layouts > 300


@pytest.mark.prove
@pytest.mark.parametrize(
    ("config", "nodes", "gpu", "length", "batch"),
    [
        (GPT_175B, 64, "a100-sxm4-80gb", 2048, 1536),
        (LLAMA_405B, 2048, "h100-sxm-80gb", 8192, 2048),
        (GPT_1T, 512, "h100-sxm-80gb", 2048, 3072),
    ],
)
def test_the_largest_searches_take_about_a_second(
    config: dict[str, JsonValue], nodes: int, gpu: str, length: int, batch: int
) -> None:
    recipe = recipe_of(
        config,
        cluster={"nodes": nodes, "gpu": gpu},
        training={"sequence_length": length, "global_batch_size": batch},
    )
    graph, cluster = graph_of(config), resolve_cluster(recipe.cluster)
    seconds = []
    for _ in range(2):
        began = time.process_time()
        result = search(problem_of(recipe, graph, cluster))
        seconds.append(time.process_time() - began)
    assert result.ranked
    assert (
        sum(region.count for region in result.rejected) + len(result.ranked) + len(result.skipped)
        > 2000
    )
    # Processor time, and room: the tests share their cores, which makes each of them slower.
    assert min(seconds) < 2.5


def test_the_pareto_front_and_the_lost_regions() -> None:
    recipe = recipe_of(
        LLAMA_8B, cluster={"nodes": 2}, training={"global_batch_size": 64, "sequence_length": 2048}
    )
    ranked = search(problem_of(recipe, graph_of(LLAMA_8B))).ranked
    front = pareto_front(ranked)
    assert front[0].time.step_seconds == min(e.time.step_seconds for e in ranked)
    assert front[-1].memory.peak_bytes == min(e.memory.peak_bytes for e in ranked)
    for e, f in itertools.product(ranked, front):
        beats = (
            e.time.step_seconds < f.time.step_seconds and e.memory.peak_bytes < f.memory.peak_bytes
        )
        assert not beats
    lost = slower_regions(recipe, ranked)
    assert sum(region.layouts for region in lost) < len(ranked)
    keys = [tuple(value for _, value in r.where) for r in lost]
    assert len(set(keys)) == len(keys) and all(r.because for r in lost)
    best = ranked[0].strategy
    assert (best.tensor, best.pipeline, best.zero_stage) not in keys


def test_more_memory_and_faster_links_never_hurt() -> None:
    """A seeded sample; `make prove` has thousands of random recipes."""
    rng = random.Random(5)
    recipe = recipe_of(
        LLAMA_8B, cluster={"nodes": 2}, training={"global_batch_size": 64, "sequence_length": 2048}
    )
    graph, cluster = graph_of(LLAMA_8B), resolve_cluster(recipe.cluster)
    larger = dataclasses.replace(
        cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=cluster.gpu.memory_gib * 1.3)
    )
    faster = dataclasses.replace(
        cluster,
        inter_node_bytes_per_second=cluster.inter_node_bytes_per_second * 2,
        intra_node_bytes_per_second=cluster.intra_node_bytes_per_second * 2,
    )
    legal = [
        s
        for s in candidate_layouts(problem_of(recipe, graph, cluster))
        if all(
            d.severity != "error"
            for d in check_layout(Problem(recipe=recipe, graph=graph, cluster=cluster), s)
        )
    ]
    for strategy in rng.sample(legal, 150):
        plain = estimate_layout(problem_of(recipe, graph, cluster), strategy)
        assert (
            estimate_layout(problem_of(recipe, graph, larger), strategy).memory.fits
            or not plain.memory.fits
        )
        assert estimate_layout(
            problem_of(recipe, graph, faster), strategy
        ).time.step_seconds <= plain.time.step_seconds * (1 + 1e-9)
