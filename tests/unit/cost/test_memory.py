"""What is alive at once: the backward pass, the optimizer's step, and what the allocator and NCCL
keep beside them."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.peak_memory import estimate_memory
from shardwright.cost.priced_layout import PricedLayout
from shardwright.layout.layout import Layout
from shardwright.layout.zero_settings import BUCKET_NUMEL
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import with_stages_assigned
from tests.unit.cost.test_estimate import BASE, change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of
from tools.fit_cost.published_runs import live_bytes

TOKENS = 4096
LOGITS_BYTES = TOKENS * 128_256 * 2


def recipe(*, gpu: str = "h100-sxm-80gb", **training: object) -> Recipe:
    return recipe_of(
        LLAMA_8B, cluster={"gpu": gpu}, training={"sequence_length": TOKENS, **training}
    )


def layout_of(strategy: Layout, of: Recipe) -> PricedLayout:
    return with_stages_assigned(problem_of(of, graph_of(LLAMA_8B)), strategy)


def test_the_optimizers_float32_gradients_never_meet_the_activations() -> None:
    """Half-precision accumulation at ZeRO-1 over two ranks: the step copies half of the gradients
    to float32."""
    half = recipe(precision="fp16", gradient_accumulation_dtype="fp16")
    layout = layout_of(change(tensor=4, data=2, activation_checkpointing="full"), half)
    numel, memory = layout.numel(0), estimate_memory(layout)
    states, copy, bucket = (2 + 2 + 12 / 2) * numel, 4 * numel / 2, 2 * BUCKET_NUMEL
    framework = default_constants().context_bytes + 3 * default_constants().communicator_bytes
    assert live_bytes(layout) == pytest.approx(states + copy + bucket + framework, rel=1e-6)
    # nvidia-smi shows the blocks of both phases while there is room.
    assert memory.peak_bytes > live_bytes(layout) + memory.stages[0].activations_bytes


def test_the_last_stage_of_a_pipeline_keeps_two_micro_batches_of_logits() -> None:
    def last_stage(micro_batches: int, **changes: object) -> int:
        two, these = (
            change(pipeline=8, data=1, gradient_accumulation_steps=m, **changes)
            for m in (2, micro_batches)
        )
        # On the same partition, which depends on the number of micro-batches.
        layout = dataclasses.replace(layout_of(two, recipe()), strategy=these)
        return estimate_memory(layout).stages[-1].workspace_bytes

    assert last_stage(2) - last_stage(1) == pytest.approx(
        LOGITS_BYTES * (1 + default_constants().fragmentation), rel=0.01
    )
    assert last_stage(8) == last_stage(2)


def test_channels_follow_the_links() -> None:
    """A board on PCIe has few channels, an H100 no more than an A100."""

    def live(gpu: str) -> int:
        return live_bytes(layout_of(BASE, recipe(gpu=gpu)))

    communicators = 2 * default_constants().communicator_bytes
    assert live("h100-sxm-80gb") == live("a100-sxm4-80gb")
    assert live("a100-sxm4-80gb") - live("v100-sxm2-32gb") == pytest.approx(
        communicators / 2, rel=1e-6
    )
    assert live("v100-sxm2-32gb") > live("l40s-48gb")
