"""`model.loss`: what chunks of the logits save and cost, and when `auto` takes them."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout, chunk_length
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.literal_types import Objective
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import estimate_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

LENGTH, VOCABULARY = 8192, 128_256


def recipe(*, objective: Objective = "throughput") -> Recipe:
    found = recipe_of(
        LLAMA_8B, cluster={"gpu": "h100-sxm-80gb"}, training={"sequence_length": LENGTH}
    )
    return dataclasses.replace(found, objective=objective)


def estimate(strategy: Layout, of: Recipe, memory_gib: float = 80) -> Estimate:
    cluster = resolve_cluster(of.cluster)
    gpu = dataclasses.replace(cluster.gpu, memory_gib=memory_gib)
    return estimate_layout(
        problem_of(of, graph_of(LLAMA_8B), dataclasses.replace(cluster, gpu=gpu)), strategy
    )


LAST_STAGE = change(
    tensor=1, pipeline=8, data=1, gradient_accumulation_steps=16, activation_checkpointing="full"
)


def test_a_chunk_is_at_most_an_eighth() -> None:
    assert [
        chunk_length(1, 8192),
        chunk_length(4, 8192),
        chunk_length(1, 2048),
        chunk_length(2, 3),
    ] == [
        1024,
        256,
        256,
        1,
    ]
    assert chunk_length(4096, 8192) == 1


@pytest.mark.parametrize(
    "layout",
    [
        LAST_STAGE,
        change(
            tensor=8,
            pipeline=1,
            data=1,
            gradient_accumulation_steps=16,
            activation_checkpointing="full",
        ),
    ],
)
def test_the_logits_of_one_chunk_instead_of_all(layout: Layout) -> None:
    whole, chunked = (
        estimate(dataclasses.replace(layout, loss=loss), recipe()) for loss in ("full", "chunked")
    )
    saved = whole.memory.stages[-1].workspace_bytes - chunked.memory.stages[-1].workspace_bytes
    logits = LENGTH * VOCABULARY / layout.tensor * 4
    assert saved > 0.5 * logits
    assert chunked.memory.peak_bytes <= whole.memory.peak_bytes
    # The head's product once more.
    assert whole.time.step_seconds < chunked.time.step_seconds < 1.1 * whole.time.step_seconds
    assert chunked.time.hardware_tflops_per_gpu * chunked.time.step_seconds > (
        whole.time.hardware_tflops_per_gpu * whole.time.step_seconds
    )
    assert chunked.time.model_tflops_per_gpu * chunked.time.step_seconds == pytest.approx(
        whole.time.model_tflops_per_gpu * whole.time.step_seconds
    )


def test_auto_takes_chunks_where_whole_logits_do_not_fit() -> None:
    roomy = estimate(LAST_STAGE, recipe())
    assert roomy.strategy.loss == "full" and roomy.memory.fits
    chunked = estimate(dataclasses.replace(LAST_STAGE, loss="chunked"), recipe())
    tight = (roomy.memory.peak_bytes + chunked.memory.peak_bytes) / 2 / 2**30
    # The allocator keeps less on a smaller device: down to where whole logits do not fit.
    while estimate(LAST_STAGE, recipe(), tight).strategy.loss == "full":
        tight *= 0.98
    found = estimate(LAST_STAGE, recipe(), tight)
    assert found.memory.fits and found.feasible
    pinned = dataclasses.replace(recipe(), model=dataclasses.replace(recipe().model, loss="full"))
    assert not estimate(LAST_STAGE, pinned, tight).memory.fits
    # One stage, so that the rank with the head is the fullest.
    single = change(
        tensor=8,
        pipeline=1,
        data=1,
        gradient_accumulation_steps=16,
        activation_checkpointing="full",
    )
    assert estimate(single, recipe(objective="memory")).strategy.loss == "chunked"


def test_auto_leaves_what_is_not_this_runtime_alone() -> None:
    other = dataclasses.replace(recipe(), assume=dataclasses.replace(recipe().assume, kernels="hf"))
    assert estimate(LAST_STAGE, other, 8).strategy.loss == "full"
