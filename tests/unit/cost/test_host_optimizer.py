"""Compare what an optimizer in host memory takes and saves, under each engine, with figures by
hand."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.literal_types import Offload
from shardwright.search.layout_resolution import estimate_layout
from shardwright.search.layout_search import best_layout
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

GPUS = 8
LAYOUT = Layout(
    tensor=1,
    pipeline=1,
    data=GPUS,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=2,
    activation_checkpointing="full",
    schedule="1f1b",
    offload="none",
)
GRAPH = graph_of(LLAMA_8B)
NUMEL = GRAPH.total_parameters


def estimate(offload: Offload, target: str = "megatron", *, accumulation: int = 2) -> Estimate:
    recipe = recipe_of(
        LLAMA_8B,
        target=target,
        cluster={"host_memory_gib": 1000},
        training={"global_batch_size": GPUS * accumulation},
    )
    layout = dataclasses.replace(LAYOUT, offload=offload, gradient_accumulation_steps=accumulation)
    return estimate_layout(problem_of(recipe, GRAPH), layout)


def test_masters_and_moments_leave_the_gpu() -> None:
    """Megatron-Core accumulates gradients in fp32 on the GPU all the same; DeepSpeed on the
    host."""
    kept, moved = (estimate(offload).memory.stages[0] for offload in ("none", "optimizer"))
    assert moved.parameters_bytes == kept.parameters_bytes == 2 * NUMEL
    assert moved.gradients_bytes == kept.gradients_bytes == 4 * NUMEL
    assert kept.optimizer_bytes == pytest.approx(12 * NUMEL / GPUS, rel=1e-6)
    assert moved.optimizer_bytes == 0 and moved.peak_bytes < kept.peak_bytes
    assert estimate("optimizer", "deepspeed").memory.stages[0].gradients_bytes == 2 * NUMEL


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_update_on_the_host(accumulation: int) -> None:
    """Of each parameter the host moves 28 bytes in AdamW and 8 in the copy to the link; 4 bytes go
    over the link alone. No micro-batch adds to that, as gradients stay on the GPU until then."""
    c = default_constants()
    updated = NUMEL / GPUS
    wanted = 36 * updated * GPUS / c.host_bytes_per_second
    wanted += 4 * updated / c.host_link_bytes_per_second
    found = estimate("optimizer", accumulation=accumulation).time
    assert found.optimizer_seconds == pytest.approx(wanted, rel=1e-6)
    assert found.data_comm_seconds == pytest.approx(
        estimate("none", accumulation=accumulation).time.data_comm_seconds, rel=1e-6
    )


@pytest.mark.parametrize(
    ("host_memory_gib", "offload"), [(None, None), (64, None), (256, "optimizer")]
)
def test_a_search_offloads_where_the_host_has_memory(
    host_memory_gib: float | None, offload: str | None
) -> None:
    """8 B parameters take 16 bytes each beside the 2 and 4 that the GPU keeps of them."""
    recipe = recipe_of(
        LLAMA_8B,
        target="megatron",
        cluster={"gpus_per_node": 1, "host_memory_gib": host_memory_gib},
        parallelism={"offload": None},
    )
    best = best_layout(problem_of(recipe, GRAPH))
    assert (best.strategy.offload if best else None) == offload


def test_a_search_keeps_what_fits_on_the_gpu() -> None:
    recipe = recipe_of(
        LLAMA_8B,
        target="megatron",
        cluster={"host_memory_gib": 2000},
        training={"global_batch_size": 64},
        parallelism={"offload": None},
    )
    best = best_layout(problem_of(recipe, GRAPH))
    assert best is not None and best.strategy.offload == "none"
