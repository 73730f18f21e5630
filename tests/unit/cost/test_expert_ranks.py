"""An expert degree divides weights and gradients of experts, never ZeRO's states; rows travel, and
arrive unevenly."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.collective_seconds import all_reduce_seconds, all_to_all_seconds, group_of
from shardwright.cost.communication_bytes import EXPERT_IMBALANCE, expert_exchange_seconds
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.layer_shapes import model_shapes
from shardwright.cost.layer_times import pass_times
from shardwright.cost.peak_memory import estimate_memory
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import StageSeconds, data_comm_seconds
from shardwright.layout.formats import element_bytes
from shardwright.layout.layout import Layout
from shardwright.layout.parameter_sharding import LayerStages
from shardwright.layout.tensor_parallel_map import tensor_parallel_map
from shardwright.plan.plan_builder import build_rank_map
from shardwright.search.layout_resolution import with_stages_assigned
from shardwright.utils.json_values import JsonValue
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of
from tools.fit_cost.published_runs import hooks_per_module

MIXTURE: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def layout_of(strategy: Layout, c: Constants | None = None) -> PricedLayout:
    problem = problem_of(recipe_of(MIXTURE, cluster={"gpu": "h100-sxm-80gb"}), graph_of(MIXTURE))
    return with_stages_assigned(problem, strategy, c or default_constants())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_what_expert_ranks_divide(zero_stage: int) -> None:
    whole = layout_of(change(tensor=1, pipeline=1, data=8, zero_stage=zero_stage))
    cut = layout_of(change(tensor=1, pipeline=1, data=8, expert=4, zero_stage=zero_stage))
    experts = 4 * 3 * 8 * 64 * 128  # layers, matrices, experts, their sizes
    assert (
        cut.expert_numel_of(cut.ranks[0]) == experts and whole.expert_numel_of(whole.ranks[0]) == 0
    )
    before, after = (estimate_memory(layout).stages[0] for layout in (whole, cut))
    assert after.optimizer_bytes == before.optimizer_bytes
    elsewhere = experts * 3 // 4 * cut.element_bytes
    assert before.parameters_bytes - after.parameters_bytes == (elsewhere if zero_stage < 3 else 0)
    assert (after.gradients_bytes < before.gradients_bytes) == (zero_stage == 1)


@pytest.mark.parametrize(
    ("tensor", "expert", "checkpointing", "again"), [(1, 8, "none", 1), (2, 4, "full", 2)]
)
def test_the_rows_of_a_layer(tensor: int, expert: int, checkpointing: str, again: int) -> None:
    """2 b S k H elements each way, on every tensor rank. No host: its floor hides a part of them
    here."""
    c = dataclasses.replace(default_constants(), collective_host_seconds=0.0)
    keys = {
        "tensor": tensor,
        "pipeline": 1,
        "data": 8 // tensor,
        "activation_checkpointing": checkpointing,
    }
    plain, layout = layout_of(change(**keys), c), layout_of(change(**keys, expert=expert), c)
    assert {kind.experts_per_token for kind in layout.shapes.kinds} == {2}
    moved = (
        EXPERT_IMBALANCE * 2 * layout.tokens * 2 * layout.graph.hidden_size * layout.element_bytes
    )
    group = group_of(layout.cluster, expert, tensor)
    wanted = all_to_all_seconds(layout.cluster, c, group, moved, 3, c.expert_alltoall_efficiency)
    before, found = pass_times(plain), pass_times(layout)
    ahead = (found.forward_comm[2] - found.forward_comm[1]) - (
        before.forward_comm[2] - before.forward_comm[1]
    )
    back = (found.backward_comm[2] - found.backward_comm[1]) - (
        before.backward_comm[2] - before.backward_comm[1]
    )
    assert ahead == pytest.approx(wanted) and back == pytest.approx(again * wanted)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_expert_ranks_add_to_activations(checkpointing: str) -> None:
    """The rows that arrive are the experts' inputs, which a layer has without expert ranks too:
    those beyond the mean alone are more."""
    keys = {"tensor": 1, "pipeline": 1, "data": 8, "activation_checkpointing": checkpointing}
    before, cut = layout_of(change(**keys)), layout_of(change(**keys, expert=8))
    (kind,) = cut.shapes.kinds
    rows = (
        cut.tokens
        * kind.experts_per_token
        * (cut.graph.hidden_size + kind.expert_features)
        * cut.element_bytes
    )
    more = 4 * (EXPERT_IMBALANCE - 1) * rows if checkpointing == "none" else 0.0  # layers
    kept = [estimate_memory(layout).stages[0].activations_bytes for layout in (before, cut)]
    assert kept[1] - kept[0] == pytest.approx(more, abs=2) and rows > 0


def test_tensor_ranks_that_hold_whole_experts() -> None:
    """Under Megatron-Core: as many experts a rank as expert ranks leave, and gradients summed over
    all that have them."""
    megatron = problem_of(
        recipe_of(MIXTURE, cluster={"gpu": "h100-sxm-80gb"}, target="megatron"), graph_of(MIXTURE)
    )

    def found(**more: object) -> PricedLayout:
        keys = {
            "tensor": 2,
            "pipeline": 1,
            "data": 4,
            "sequence_parallel": True,
            "expert": 2,
            **more,
        }
        return with_stages_assigned(megatron, change(**keys), default_constants())

    cut, whole = found(), found(expert_tensor=1)
    experts = 4 * 3 * 8 * 64 * 128 // 2  # on two tensor ranks
    assert cut.strategy.expert_shard_ratio == 2 and whole.strategy.expert_shard_ratio == 1
    before, after = (estimate_memory(layout).stages[0] for layout in (cut, whole))
    assert after.parameters_bytes - before.parameters_bytes == experts // 2 * cut.element_bytes
    assert after.optimizer_bytes == before.optimizer_bytes
    assert found(expert_tensor=1, expert=4).strategy.expert_shard_ratio == 2
    assert (
        expert_exchange_seconds(whole)[1] < expert_exchange_seconds(cut)[1]
    )  # no rows are gathered over tensor ranks
    # One data rank: the experts' gradients alone are on two ranks.
    alone = found(data=1, expert=1, expert_tensor=1, zero_stage=0)
    group = group_of(alone.cluster, 2, 1)
    idle = StageSeconds(compute=0.0, tensor_comm=0.0, pipeline_comm=0.0)
    moved = 2 * experts * element_bytes(alone.accumulation_dtype)
    reduced = all_reduce_seconds(alone.cluster, alone.constants, group, moved, 1)
    assert data_comm_seconds(alone, 0, idle) == pytest.approx(reduced) and reduced > 0
    assert data_comm_seconds(found(data=1, expert=1, zero_stage=0), 0, idle) == 0


def test_rows_within_a_node_and_beyond_go_at_the_same_time() -> None:
    cluster, c = (
        problem_of(recipe_of(MIXTURE, cluster={"nodes": 2}), graph_of(MIXTURE)).cluster,
        default_constants(),
    )
    slots = cluster.gpus_per_node
    inside = all_to_all_seconds(cluster, c, group_of(cluster, slots, 1), 1e9, 0)
    across = all_to_all_seconds(cluster, c, group_of(cluster, 2 * slots, 1), 1e9, 0)
    rate = cluster.inter_node_bytes_per_second * c.inter_node_efficiency
    assert across == pytest.approx(1e9 / 2 / rate) and inside < across


def test_a_rank_of_the_plan_holds_its_own_experts() -> None:
    """The bytes of plan.json are those that the memory model counts."""
    strategy = change(tensor=1, pipeline=1, data=8, expert=4)
    layout = layout_of(strategy)
    partition, problem = (
        LayerStages(boundaries=layout.boundaries, schedule=strategy.schedule),
        layout.problem,
    )
    tensor_map = tensor_parallel_map(problem.graph, 1)
    ranks = build_rank_map(
        problem.graph, problem.cluster, strategy, partition, tensor_map, problem.recipe
    )
    (stage,) = estimate_memory(layout).stages
    assert {rank.parameter_bytes for rank in ranks} == {stage.parameters_bytes}


def test_a_stack_of_experts_is_one_module() -> None:
    """For DeepSpeed's hooks, which stand around modules; published runs had three for each
    expert."""
    shapes, graph = model_shapes(graph_of(MIXTURE), 1), graph_of(MIXTURE)
    experts, layers = MIXTURE["num_local_experts"], graph.decoder_layers
    assert isinstance(experts, int)
    more = shapes.modules[-1] * (hooks_per_module(graph) - 1)
    assert more == pytest.approx(layers * (3 * experts - 1))
