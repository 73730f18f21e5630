"""Muon in the estimate: one moment of its matrices, and the iterations of an update."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.cost.communication_bytes import step_traffic
from shardwright.cost.goodput import node_checkpoint_bytes
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.muon_matrices import muon_parameters, newton_schulz_flops
from shardwright.search.layout_resolution import estimate_layout, price_planned_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of
from tests.unit.search.test_muon_rules import with_muon

GRAPH = graph_of(LLAMA_8B)
MATRICES = sum(p.numel for p in muon_parameters(GRAPH, ()))


def estimates(**layout: Any) -> tuple[Estimate, Estimate]:
    """AdamW's and Muon's."""
    degrees = {"tensor": 1, "pipeline": 1, "data": 8, "gradient_accumulation_steps": 2} | layout
    adamw, muon = (
        estimate_layout(problem_of(recipe, GRAPH), change(**degrees))
        for recipe in (recipe_of(LLAMA_8B), with_muon(LLAMA_8B))
    )
    return adamw, muon


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_matrices_have_one_moment(zero_stage: int) -> None:
    adamw, muon = estimates(zero_stage=zero_stage)
    [of_adamw], [of_muon] = adamw.memory.stages, muon.memory.stages
    assert of_adamw.optimizer_bytes - of_muon.optimizer_bytes == pytest.approx(4 * MATRICES / 8)
    assert of_adamw.gradients_bytes == of_muon.gradients_bytes
    assert MATRICES == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)


def test_iterations_take_time_that_ranks_share() -> None:
    flops = sum(newton_schulz_flops(GRAPH, p, 5) for p in muon_parameters(GRAPH, ()))
    spent = {}
    for stage in (1, 3):
        adamw, muon = estimates(zero_stage=stage)
        spent[stage] = muon.time.optimizer_seconds - adamw.time.optimizer_seconds
    least = flops / 8 / 989e12
    assert least < spent[1] < 4 * least
    assert spent[3] > spent[1]  # every matrix is gathered


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_only_muon_gathers_matrices(zero_stage: int) -> None:
    """AdamW's first: what is memoized is not the other's."""
    layout = change(
        tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2, zero_stage=zero_stage
    )
    gathered = [
        step_traffic(
            price_planned_layout(problem_of(recipe, GRAPH), layout, (0, len(GRAPH.layers)))[0], 0
        ).muon_matrices
        for recipe in (recipe_of(LLAMA_8B), with_muon(LLAMA_8B))
    ]
    # Each of eight ranks has four whole layers of 32 in its part of the flat matrices.
    assert gathered == [0, 2 * 2 * MATRICES if zero_stage == 3 else 0]


def test_a_checkpoint_has_the_moments() -> None:
    layout = change(tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2)
    adamw, muon = (
        sum(
            node_checkpoint_bytes(
                price_planned_layout(problem_of(recipe, GRAPH), layout, (0, len(GRAPH.layers)))[0]
            )
        )
        for recipe in (recipe_of(LLAMA_8B), with_muon(LLAMA_8B))
    )
    assert adamw == pytest.approx(12 * GRAPH.total_parameters)
    assert adamw - muon == pytest.approx(4 * MATRICES)
