"""A context degree divides tokens and states, and trades heads for tokens around each layer's
attention."""

from __future__ import annotations

import pytest

from shardwright.cost.collective_seconds import gather_seconds, group_of
from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layer_times import pass_times
from shardwright.cost.peak_memory import estimate_memory, model_state_bytes
from shardwright.cost.priced_layout import PricedLayout
from shardwright.layout.layout import Layout
from shardwright.search.layout_resolution import with_stages_assigned
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

TOKENS = 8192


def layout_of(strategy: Layout) -> PricedLayout:
    recipe = recipe_of(
        LLAMA_8B, cluster={"gpu": "h100-sxm-80gb"}, training={"sequence_length": TOKENS}
    )
    return with_stages_assigned(problem_of(recipe, graph_of(LLAMA_8B)), strategy)


def test_a_rank_has_a_piece_of_each_row() -> None:
    whole = layout_of(change(tensor=1, pipeline=1, data=4, zero_stage=3))
    cut = layout_of(change(tensor=1, pipeline=1, data=4, context=2, zero_stage=3))
    kept = [estimate_memory(layout).stages[0].activations_bytes for layout in (whole, cut)]
    assert cut.tokens == whole.tokens / 2 and kept[1] == pytest.approx(kept[0] / 2)
    assert model_state_bytes(cut, 1000) == pytest.approx(
        [x / 2 for x in model_state_bytes(whole, 1000)]
    )


@pytest.mark.parametrize(("context", "key_value_heads"), [(2, 8), (8, 8), (16, 16)])
@pytest.mark.parametrize(("checkpointing", "again"), [("none", 1), ("full", 2)])
def test_the_exchange_of_a_layer(
    context: int, key_value_heads: int, checkpointing: str, again: int
) -> None:
    """32 heads of queries and 8 of keys, of 128: B S/s (2h + 2kv') d bytes, of which (s - 1) / s
    leave a rank."""
    layout = layout_of(
        change(
            tensor=1,
            pipeline=1,
            data=1,
            context=context,
            zero_stage=1,
            activation_checkpointing=checkpointing,
        )
    )
    moved = layout.tokens * (2 * 32 + 2 * key_value_heads) * 128 * 2
    wanted = gather_seconds(
        layout.cluster, default_constants(), group_of(layout.cluster, context, 1), moved, 4
    )
    found = pass_times(layout)
    assert found.forward_comm[2] - found.forward_comm[1] == pytest.approx(wanted)
    assert found.backward_comm[2] - found.backward_comm[1] == pytest.approx(again * wanted)
