"""The parts of the step and of the memory add up to the estimate's, for every kind of layout."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from shardwright.cost.layout_costs import break_down
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Layout
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.search.layout_resolution import estimate_layout, resolve_layout
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.rule_registry import check_layout
from tests.unit.cli.shipped_models import MODELS, cluster_of, recipe_for
from tests.unit.models.factory import problem_of


def layouts() -> list[tuple[str, int, Layout]]:
    """A few of every schedule, ZeRO stage, checkpointing and offload that is legal, on one node and
    on four."""
    draw = random.Random(7)
    found = []
    for model, graph in MODELS.items():
        for nodes in (1, 4):
            cluster = cluster_of(nodes)
            recipe = recipe_for(offload=None)
            problem = problem_of(recipe, graph, cluster)
            candidates = list(candidate_layouts(problem))
            draw.shuffle(candidates)
            # Drawn, then checked: to check all takes seconds at each collection of the tests.
            legal = (
                s
                for s in candidates
                if all(d.severity != "error" for d in check_layout(problem, s))
            )
            found += [(model, nodes, s) for s in itertools.islice(legal, 25)]
            full = (s for s in legal if s.activation_checkpointing == "full")
            some = PartialCheckpointing(full=1)
            found += [
                (model, nodes, dataclasses.replace(s, activation_checkpointing=some))
                for s in itertools.islice(full, 5)
            ]
    return found


@pytest.mark.parametrize(("model", "nodes", "strategy"), layouts())
def test_parts_add_up(model: str, nodes: int, strategy: Layout) -> None:
    graph, cluster, recipe = MODELS[model], cluster_of(nodes), recipe_for(offload=None)
    estimate = estimate_layout(problem_of(recipe, graph, cluster), strategy)
    layout, _ = resolve_layout(problem_of(recipe, graph, cluster), strategy)
    found = break_down(layout, estimate)
    step, time = found.step, estimate.time
    total = time.step_seconds
    assert step.total_seconds == pytest.approx(total, rel=1e-12)
    compute = step.forward_seconds + step.backward_seconds + step.recompute_seconds
    compute += step.accumulate_seconds + step.host_seconds
    assert compute == pytest.approx(time.compute_seconds, rel=1e-9)
    tensor = step.tensor_forward_seconds + step.tensor_backward_seconds
    assert tensor == pytest.approx(time.tensor_comm_seconds, rel=1e-9)
    assert step.idle_seconds == pytest.approx(time.bubble_seconds, rel=1e-6, abs=1e-8 * total)
    again = sum(rank.time.recompute_seconds for rank in found.ranks)
    chosen = estimate.strategy  # the loss is settled by the estimate
    assert (again > 0) == (chosen.activation_checkpointing != "none" or chosen.loss == "chunked")
    assert len(found.ranks) == strategy.pipeline
    for rank, stage in zip(found.ranks, estimate.memory.stages, strict=True):
        assert rank.memory.peak_bytes == stage.peak_bytes
        assert min(dataclasses.astuple(rank.memory)) >= 0
        assert rank.time.total_seconds == pytest.approx(total, rel=1e-9)
        assert min(dataclasses.astuple(rank.time)) >= -1e-9 * total
    assert found.ranks[found.peak_memory_rank].memory.peak_bytes == estimate.memory.peak_bytes
    held = sorted(
        i for rank in found.ranks for start, stop in rank.layers for i in range(start, stop)
    )
    assert held == list(range(len(graph.layers)))
    boundaries = estimate.boundaries
    assert {start for rank in found.ranks for start, _ in rank.layers} == set(boundaries[:-1])


def test_a_larger_part_is_a_larger_part() -> None:
    """The same layout with slower links between nodes: only the collectives over them and the idle
    time change."""
    graph, recipe = MODELS["llama"], recipe_for()
    strategy = next(
        s
        for s in candidate_layouts(problem_of(recipe, graph, cluster_of(4)))
        if (s.tensor, s.pipeline, s.data, s.zero_stage) == (2, 1, 16, 1)
    )

    def step(cluster: Cluster) -> dict[str, float]:
        estimate = estimate_layout(problem_of(recipe, graph, cluster), strategy)
        return dataclasses.asdict(
            break_down(
                resolve_layout(problem_of(recipe, graph, cluster), strategy)[0], estimate
            ).step
        )

    fast = step(cluster_of(4))
    slow = step(dataclasses.replace(cluster_of(4), inter_node_bytes_per_second=1e9))
    changed = {
        name for name in fast if slow[name] != pytest.approx(fast[name], rel=1e-9, abs=1e-12)
    }
    assert (
        changed == {"data_comm_seconds"} and slow["data_comm_seconds"] > fast["data_comm_seconds"]
    )
