"""How often collectives run and what they move; tests/parity/test_bytes.py compares the same counts
with real runs."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest

from shardwright.cost import communication_bytes
from shardwright.cost.communication_bytes import layer_all_reduces, pipeline_sends, step_traffic
from shardwright.cost.layer_times import pipeline_send_seconds
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import StageSeconds, data_comm_seconds
from shardwright.layout.layout import Layout
from shardwright.recipe.literal_types import Schedule
from shardwright.recipe.objectives import PLAIN_OBJECTIVE, ObjectiveSection
from shardwright.search.layout_resolution import with_stages_assigned
from tests.unit.cost.test_estimate import BASE, sized
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

ZERO_3 = dataclasses.replace(BASE, zero_stage=3)
LAYER, NUMEL = 218_112_000, 8_030_261_248
"""Elements of a decoder layer and of all of Llama-3.1-8B."""


KTO = ObjectiveSection(name="kto", beta=0.1)
"""Runs forward over other completions before each step."""


def layout_of(
    strategy: Layout,
    objective: ObjectiveSection = PLAIN_OBJECTIVE,
    link_gbytes_per_second: float | None = None,
) -> PricedLayout:
    batch = strategy.micro_batch_size * strategy.gradient_accumulation_steps * strategy.data
    links = {"intra_node_gbytes_per_second": link_gbytes_per_second}
    recipe = recipe_of(LLAMA_8B, training={"objective": objective}, cluster=links)
    recipe = sized(recipe, batch, strategy.world_size, 1)
    return with_stages_assigned(problem_of(recipe, graph_of(LLAMA_8B)), strategy)


def again(strategy: Layout, live: int, objective: ObjectiveSection = PLAIN_OBJECTIVE) -> int:
    layout = layout_of(strategy, objective)
    with patch.object(communication_bytes, "LIVE_NUMEL", live):
        return round(communication_bytes.regathered_fraction(layout, layout.ranks[0]) * NUMEL)


def test_the_last_layers_are_gathered_once() -> None:
    assert again(ZERO_3, 0) == NUMEL
    assert again(ZERO_3, 100 * NUMEL) == 0
    kept = NUMEL - again(ZERO_3, 10**9)
    head = 128256 * 4096 + 4096
    # Twice the head lies behind the last layer: nothing of that layer comes up within 10^9
    # elements.
    assert kept == head


def test_recomputed_layers_are_gathered_for_that_and_for_their_backward_pass() -> None:
    full = dataclasses.replace(ZERO_3, activation_checkpointing="full")
    # Each layer but its last module a third time.
    assert again(full, 0) == NUMEL + 32 * (LAYER - 14336 * 4096)
    assert again(full, 10**9) == NUMEL - (128256 * 4096 + 4096)  # a layer stays whole between both


def test_a_forward_only_pass_gathers_what_is_released() -> None:
    full = dataclasses.replace(ZERO_3, activation_checkpointing="full")
    released = NUMEL - (128256 * 4096 + 4096)
    assert again(ZERO_3, 0, KTO) == 2 * NUMEL
    assert again(ZERO_3, 10**9, KTO) == 2 * released
    assert again(ZERO_3, 100 * NUMEL, KTO) == 0, "the pass after it finds all parameters"
    # What recomputation gathers a third time is no part of it.
    assert again(full, 0, KTO) == again(full, 0) + NUMEL


def test_a_forward_only_pass_takes_its_gathers() -> None:
    """Over links so slow that nothing else counts: two gathers and a reduction, then three."""
    with patch.object(communication_bytes, "LIVE_NUMEL", 0):
        plain, kto = (
            data_comm_seconds(layout_of(ZERO_3, objective, 0.1), 0, StageSeconds(0.0, 0.0, 0.0))
            for objective in (PLAIN_OBJECTIVE, KTO)
        )
    assert kto == pytest.approx(plain * 4 / 3, rel=1e-3)


def test_partial_checkpointing_is_between_none_and_all() -> None:
    from shardwright.recipe.literal_types import PartialCheckpointing

    some = dataclasses.replace(ZERO_3, activation_checkpointing=PartialCheckpointing(full=8))
    full = dataclasses.replace(ZERO_3, activation_checkpointing="full")
    assert again(ZERO_3, 0) < again(some, 0) < again(full, 0)


def test_weights_that_stay_whole_take_memory() -> None:
    layout = layout_of(ZERO_3)
    assert (
        communication_bytes.unsharded_weights(layout, layout.ranks[0]).resident
        == 128256 * 4096 + 4096
    )
    with patch.object(communication_bytes, "LIVE_NUMEL", 100 * NUMEL):
        assert communication_bytes.unsharded_weights(layout, layout.ranks[0]).resident == NUMEL


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", [1, 2, 2, 1]), ("dualpipev", [2, 4, 4, 2])]
)
def test_messages(schedule: Schedule, ranks: list[int]) -> None:
    s = dataclasses.replace(
        BASE, pipeline=4, data=2, gradient_accumulation_steps=8, schedule=schedule
    )
    assert [pipeline_sends(layout_of(s), rank) for rank in range(4)] == ranks


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", [2, 3, 3, 1]), ("dualpipev", [3, 6, 6, 3])]
)
def test_a_forward_only_pass_sends_no_gradients(schedule: Schedule, ranks: list[int]) -> None:
    s = dataclasses.replace(
        BASE, pipeline=4, data=2, gradient_accumulation_steps=8, schedule=schedule
    )
    layout = layout_of(s, KTO)
    message = 8 * layout.tokens * 4096 * 2
    assert [step_traffic(layout, rank).pipeline_send / message for rank in range(4)] == ranks
    # Of three messages over a boundary two are a training's.
    ratio = pipeline_send_seconds(layout) / pipeline_send_seconds(layout_of(s))
    assert ratio == pytest.approx(3 / 2)


def test_reductions_of_a_layer() -> None:
    s = dataclasses.replace(BASE, tensor=2, data=4)
    assert layer_all_reduces(layout_of(s)) == (2, 0)
    assert layer_all_reduces(
        layout_of(dataclasses.replace(s, activation_checkpointing="full"))
    ) == (
        2,
        1,
    )
    assert layer_all_reduces(layout_of(BASE)) == (0, 0)


def test_what_one_rank_alone_moves() -> None:
    alone = step_traffic(layout_of(dataclasses.replace(BASE, data=1)), 0)
    assert set(dataclasses.asdict(alone).values()) == {0.0}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_ranks(stage: int) -> None:
    moved = step_traffic(layout_of(dataclasses.replace(BASE, zero_stage=stage)), 0)
    assert (
        moved.gradient_reduce
        == {0: 4 * NUMEL, 1: 4 * NUMEL, 2: 4 * 2 * NUMEL, 3: 4 * 2 * NUMEL}[stage]
    )
    kept = 128256 * 4096 + 4096
    assert (
        round(moved.parameter_all_gather)
        == {0: 0, 1: 2 * NUMEL, 2: 2 * NUMEL, 3: 4 * 2 * (2 * NUMEL - kept)}[stage]
    )


def test_context_ranks() -> None:
    """Queries, output, and keys and values of 8 heads: (2 x 32 + 2 x 8) x 128 elements a token,
    forward and back."""
    layout = layout_of(dataclasses.replace(BASE, context=2, data=4))
    assert step_traffic(layout, 0).context_all_to_all == 4 * 32 * 2 * layout.tokens * 80 * 128 * 2
