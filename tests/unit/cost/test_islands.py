"""The outer step's price, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import estimate_recipe
from shardwright.cost.diloco_costs import DATA_PARALLEL, ISLANDS, inner_step_seconds, islands_cost
from shardwright.cost.layout_costs import break_down
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.search.rule_registry import check_layout
from tests.unit.models.factory import SMALL_LLAMA, graph_of

GRAPH = graph_of(SMALL_LLAMA)


def recipe(tmp_path: Path, *, islands: int = 2, gbits: float = 1.0, **outer: Any) -> Any:
    document = {
        "version": 1,
        "name": "islands",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {
            "nodes": islands,
            "gpus_per_node": 8,
            "gpu": "h100-sxm-80gb",
            "islands": islands,
            "inter_island_gbits_per_second": gbits,
            "price_per_gpu_hour": 2.0,
        },
        "training": {
            "sequence_length": 128,
            "global_batch_size": 64 * islands,
            "steps": 1000,
            "outer": outer,
        },
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(document))
    return load_recipe(path)


# Two islands of 8, 64 and 256 H100 at 40 % MFU, steps of 1.05 M, 4.2 M and 4.2 M tokens each:
# parameters -> seconds of a step; and the share of training's time that bf16 deltas every 100 steps
# are exposed, at 1, 10 and 100 Gbit/s.
STEPS = {1e9: 2.0, 8e9: 8.0, 70e9: 17.5}
SHARES = {1e9: (0.08, 0.008, 0.0008), 8e9: (0.16, 0.016, 0.0016), 70e9: (0.64, 0.064, 0.0064)}


@pytest.mark.parametrize(("parameters", "shares"), SHARES.items())
def test_exposed_shares(tmp_path: Path, parameters: float, shares: tuple[float, ...]) -> None:
    graph = int(parameters)
    for gbits, share in zip((1, 10, 100), shares, strict=True):
        found = islands_cost(recipe(tmp_path, gbits=gbits), graph, STEPS[parameters])
        assert found is not None and found.exposed_share == pytest.approx(share, rel=1e-6)
        assert found.sent_bytes == 2 * parameters
        rarer = islands_cost(
            recipe(tmp_path, gbits=gbits, every_steps=500), graph, STEPS[parameters]
        )
        assert rarer is not None and rarer.exposed_share == pytest.approx(share / 5)


@pytest.mark.parametrize(("parameters", "gbits"), [(1e9, 8), (8e9, 16), (70e9, 64)])
def test_data_parallelism_is_taken_where_its_gradients_hide(
    tmp_path: Path, parameters: float, gbits: float
) -> None:
    graph, step = int(parameters), STEPS[parameters]
    below = islands_cost(recipe(tmp_path, gbits=gbits * 0.9), graph, step)
    above = islands_cost(recipe(tmp_path, gbits=gbits * 1.01), graph, step)
    assert below is not None and above is not None
    assert (below.take, above.take) == (ISLANDS, DATA_PARALLEL)
    assert (
        below.data_parallel_step_seconds == pytest.approx(step / 0.9)
        and above.data_parallel_step_seconds == step
    )


def test_overlap_hides_what_fits_behind_the_steps(tmp_path: Path) -> None:
    graph = 10**9
    waits = [islands_cost(recipe(tmp_path, overlap_steps=n), graph, 2.0) for n in (0, 3, 8)]
    assert [found and found.exposed_seconds for found in waits] == pytest.approx([16, 10, 0])


def test_more_islands_bring_more_to_the_stores_link(tmp_path: Path) -> None:
    two, four = (
        islands_cost(recipe(tmp_path, islands=n, precision="fp32"), GRAPH.total_parameters, 1.0)
        for n in (2, 4)
    )
    assert two is not None and four is not None
    assert (two.sent_bytes, four.sent_bytes) == (
        4 * GRAPH.total_parameters,
        12 * GRAPH.total_parameters,
    )


def test_the_outer_step_is_a_part_of_the_step(tmp_path: Path) -> None:
    slow = recipe(tmp_path, gbits=0.001)
    problem, estimate = estimate_recipe(slow)
    _, plain = estimate_recipe(
        dataclasses.replace(slow, training=dataclasses.replace(slow.training, outer=None))
    )
    time = estimate.time
    bytes_sent = 2 * problem.graph.total_parameters
    assert time.outer_comm_seconds == pytest.approx(bytes_sent * 8 / 1e6 / 100)
    parts = [getattr(time, f.name) for f in dataclasses.fields(time) if f.name.endswith("_seconds")]
    assert sum(parts) - time.step_seconds == pytest.approx(time.step_seconds, rel=1e-6)
    assert inner_step_seconds(time) == pytest.approx(plain.time.step_seconds)
    for rate in (
        "tokens_per_second_per_gpu",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
    ):
        assert getattr(time, rate) * time.step_seconds == pytest.approx(
            getattr(plain.time, rate) * plain.time.step_seconds
        )
    # GPU hours and money are those of all islands.
    assert estimate.training.gpu_hours == pytest.approx(1000 * time.step_seconds / 3600 * 16)
    assert estimate.training.cost == pytest.approx(2 * estimate.training.gpu_hours)
    layout, same = price_planned_layout(problem, estimate.strategy, estimate.boundaries)
    found = break_down(layout, same)
    assert found.step.total_seconds == pytest.approx(time.step_seconds)
    assert found.step.outer_comm_seconds == time.outer_comm_seconds
    assert all(rank.time.total_seconds == pytest.approx(time.step_seconds) for rank in found.ranks)


def test_layouts_that_were_not_compared(tmp_path: Path) -> None:
    problem, estimate = estimate_recipe(recipe(tmp_path))
    for change in (
        {"context": 2},
        {"expert": 2, "zero_stage": 0},
        {"offload": "optimizer"},
        {"schedule": "dualpipev"},
    ):
        codes = [
            d.code for d in check_layout(problem, dataclasses.replace(estimate.strategy, **change))
        ]
        assert "SW3173" in codes
    assert "SW3173" not in [d.code for d in check_layout(problem, estimate.strategy)]
