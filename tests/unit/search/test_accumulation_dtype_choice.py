"""gradient_accumulation_dtype: auto takes bf16 where fp32 leaves only what is much slower, or
nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.layout.planning_problem import Problem
from shardwright.report.plan_sentences import low_precision_accumulation_text
from shardwright.search.accumulation_dtype_choice import (
    BF16_ACCUMULATION_FROM,
    estimate_with_accumulation_dtype,
    low_precision_accumulation,
)
from shardwright.search.engine_choice import resolve_problem
from shardwright.search.layout_search import estimate_pinned_layout, search
from shardwright.search.ranking_penalties import penalized_seconds
from tests.unit.models.factory import LLAMA_70B, graph_of, problem_of, recipe_of

GIB_PER_GPU = {"much slower": 170.0, "none fits": 150.0, "room": 260.0}
DOCUMENT: dict[str, Any] = {"training": {}}


def problem(gib: float, **more: Any) -> Problem:
    training = {"sequence_length": 4096, "global_batch_size": 64, **more.pop("training", {})}
    pins = {
        "tensor": 1,
        "pipeline": 1,
        "zero_stage": 3,
        "activation_checkpointing": "full",
        **more.pop("pins", {}),
    }
    recipe = recipe_of(
        LLAMA_70B,
        cluster={"nodes": 1, "gpu": "b200-sxm-180gb"},
        training=training,
        parallelism=pins,
        **more,
    )
    asked = problem_of(dataclasses.replace(recipe, document=DOCUMENT), graph_of(LLAMA_70B))
    gpu = dataclasses.replace(asked.cluster.gpu, memory_gib=gib)
    return dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, gpu=gpu))


def summed_in(found: Problem) -> str | None:
    return found.recipe.training.gradient_accumulation_dtype


def test_where_memory_does_not_bind_nothing_changes() -> None:
    asked = problem(GIB_PER_GPU["room"])
    settled, sizing = resolve_problem(asked)
    assert settled is asked and sizing is None and low_precision_accumulation(settled) is None


def test_where_fp32_is_much_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(GIB_PER_GPU["much slower"], pins={"tensor": None})
    settled, _ = resolve_problem(asked)
    assert summed_in(settled) == "bf16"
    full, half = (search(each).ranked[0] for each in (asked, settled))
    assert penalized_seconds(asked.recipe, full) >= BF16_ACCUMULATION_FROM * penalized_seconds(
        asked.recipe, half
    )
    monkeypatch.setattr("shardwright.search.layout_search._search", None)  # both were made
    found = low_precision_accumulation(settled)
    assert found is not None and found.seconds == full.time.step_seconds
    assert f"would take {full.time.step_seconds:.3g} s" in low_precision_accumulation_text(found)
    assert any(d.code == "SW3121" for d in half.diagnostics)


def test_where_nothing_fits_in_fp32() -> None:
    asked = problem(GIB_PER_GPU["none fits"])
    assert not search(asked).ranked
    settled, _ = resolve_problem(asked)
    found = low_precision_accumulation(settled)
    assert search(settled).ranked and found is not None and found.seconds is None
    assert (
        low_precision_accumulation_text(found)
        == "gradients are summed in bf16: no layout fits with sums in fp32"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"training": {"gradient_accumulation_dtype": "fp32"}},
        {"training": {"precision": "fp16"}},
        {"objective": "memory"},
    ],
)
def test_where_it_is_not_open(more: dict[str, Any]) -> None:
    asked = problem(GIB_PER_GPU["none fits"], **more)
    assert resolve_problem(asked)[0] is asked


def test_where_bf16_does_not_help_either() -> None:
    asked = problem(40.0)
    assert resolve_problem(asked)[0] is asked


PINNED = {"tensor": 2, "data": 4, "zero_stage": 1, "micro_batch_size": 1}
"""Of one layout: 284 and 387 GiB a GPU with sums in bf16 and fp32, 283 and 317 under Megatron,
whose optimizer copies them to fp32."""


def test_megatron_sums_in_bf16_too() -> None:
    asked = problem(300.0, pins=PINNED)
    asked = dataclasses.replace(asked, recipe=dataclasses.replace(asked.recipe, target="megatron"))
    assert not search(asked).ranked
    settled, _ = resolve_problem(asked)
    assert summed_in(settled) == "bf16" and search(settled).ranked


@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
@pytest.mark.parametrize("ignore_memory", [False, True])
def test_an_estimate_of_one_layout_resolves_it_as_compile_does(
    target: str, ignore_memory: bool
) -> None:
    asked = problem(300.0, pins=PINNED, assume={"ignore_memory": ignore_memory})
    asked = dataclasses.replace(asked, recipe=dataclasses.replace(asked.recipe, target=target))
    in_fp32 = estimate_pinned_layout(asked)
    settled, found = estimate_with_accumulation_dtype(asked)
    assert not in_fp32.memory.fits and in_fp32.feasible == ignore_memory
    assert summed_in(settled) == "bf16" and found.memory.fits and found.feasible
    gpu = dataclasses.replace(asked.cluster.gpu, memory_gib=80.0)
    small = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, gpu=gpu))
    same, found = estimate_with_accumulation_dtype(small)
    assert same is small and not found.memory.fits and found.feasible == ignore_memory
