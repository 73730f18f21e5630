"""LoRA in the estimate: gradients, optimizer states and their time are the adapters' alone."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.layout.layout_estimate import Estimate
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.trainable_parameters import adapted_modules, adapter_sizes
from shardwright.recipe.recipe_types import LoraSection
from shardwright.search.layout_resolution import estimate_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import (
    LLAMA_8B,
    SMALL_LLAMA,
    graph_of,
    model_section,
    problem_of,
    recipe_of,
)

LORA = LoraSection(rank=16, alpha=32, dropout=0.0, target_modules=None)
BASE = 8_030_261_248
# 32 layers of q, o (4096 + 4096), k, v (4096 + 1024), gate, up, down (4096 + 14336), rank 16.
ADAPTERS = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)


def estimate(zero_stage: int, lora: LoraSection | None, checkpointing: str = "full") -> Estimate:
    recipe = dataclasses.replace(recipe_of(LLAMA_8B, training={"sequence_length": 2048}), lora=lora)
    layout = change(
        tensor=1,
        pipeline=1,
        data=8,
        gradient_accumulation_steps=2,
        zero_stage=zero_stage,
        activation_checkpointing=checkpointing,
    )
    return estimate_layout(problem_of(recipe, graph_of(LLAMA_8B)), layout)


def test_auto_is_every_linear_of_a_layer() -> None:
    graph = graph_of(LLAMA_8B)
    names = adapted_modules(graph, LORA)
    assert set(names) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert sum(sum(adapter_sizes(layer, names, 16)) for layer in graph.layers) == ADAPTERS


def test_a_reward_models_head_is_trained_beside_the_adapters() -> None:
    recipe = dataclasses.replace(recipe_of(SMALL_LLAMA), lora=LORA)
    layout = change(tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2, zero_stage=1)
    reward = build_model_graph(model_section(SMALL_LLAMA, task="sequence-classification"))
    states = [
        estimate_layout(problem_of(recipe, graph), layout).memory.stages[0].optimizer_bytes
        for graph in (reward, graph_of(SMALL_LLAMA))
    ]
    assert states[0] - states[1] == pytest.approx(12 * reward.hidden_size / 8)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_states_are_those_of_the_adapters(zero_stage: int) -> None:
    (stage,) = estimate(zero_stage, LORA).memory.stages
    assert stage.parameters_bytes == pytest.approx(
        2 * (BASE + ADAPTERS) / (8 if zero_stage == 3 else 1)
    )
    assert stage.optimizer_bytes == pytest.approx(12 * ADAPTERS / 8)
    (whole,) = estimate(zero_stage, None).memory.stages
    assert stage.gradients_bytes == pytest.approx(whole.gradients_bytes * ADAPTERS / BASE, rel=1e-6)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_time_is_that_of_the_adapters(zero_stage: int) -> None:
    adapted, whole = estimate(zero_stage, LORA).time, estimate(zero_stage, None).time
    assert adapted.optimizer_seconds == pytest.approx(
        whole.optimizer_seconds * ADAPTERS / BASE, rel=1e-6
    )
    # ZeRO-3's hooks bound both from below: what the GPU leaves of the host's time is in data_comm.
    seconds = [time.compute_seconds + time.data_comm_seconds for time in (adapted, whole)]
    assert (
        seconds[0] <= seconds[1]
        if zero_stage == 3
        else adapted.data_comm_seconds < whole.data_comm_seconds
    )
    # No products for the gradients of frozen weights: a third of the work, less what is recomputed
    # and memory-bound.
    assert 0.6 < adapted.compute_seconds / whole.compute_seconds < 0.9
    assert adapted.model_tflops_per_gpu * adapted.step_seconds == pytest.approx(
        whole.model_tflops_per_gpu * whole.step_seconds * 2 / 3
    )


def test_a_base_that_only_adapters_fit_beside() -> None:
    assert (
        estimate(1, LORA).memory.peak_bytes < estimate(1, None).memory.peak_bytes - 8 * BASE * 0.5
    )
