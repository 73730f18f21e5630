"""± stands where published runs stand behind it, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import pytest

from shardwright.cluster.resolve import resolve_cluster
from shardwright.cost.measured import error_words, prediction_error
from shardwright.ir.json_value import JsonValue
from shardwright.ir.lora import LoraSection
from shardwright.layout.estimate import PredictionError
from shardwright.layout.strategy import Strategy
from tests.unit.model.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of
from tools.fit_cost import score
from tools.fit_cost.bench import packaged
from tools.fit_cost.cases import ROWS

MIXTURE: dict[str, JsonValue] = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
PLAIN = Strategy(
    tensor=2,
    pipeline=2,
    data=2,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=2,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)
LORA = LoraSection(rank=8, alpha=16.0, dropout=0.0, target_modules=None)


def error_of(
    *,
    gpu: Any = "a100-sxm4-80gb",
    nodes: int = 1,
    config: dict[str, JsonValue] | None = None,
    precision: str = "bf16",
    kernels: str = "auto",
    lora: LoraSection | None = None,
    target: str = "deepspeed",
    **layout: Any,
) -> PredictionError:
    recipe = recipe_of(
        config, cluster={"gpu": gpu, "nodes": nodes}, training={"precision": precision}, assume={"kernels": kernels}
    )
    recipe = dataclasses.replace(recipe, lora=lora, target=target)
    strategy = dataclasses.replace(PLAIN, **layout)
    return prediction_error(problem_of(recipe, graph_of(config or SMALL_LLAMA)), strategy)


@pytest.mark.parametrize("gpu", ["a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm-80gb"])
@pytest.mark.parametrize(
    "kind",
    [{}, {"zero_stage": 3}, {"zero_stage": 0}, {"nodes": 48}, {"nodes": 16, "zero_stage": 3, "kernels": "hf"}],
)
def test_where_runs_stand_behind_it(gpu: str, kind: dict[str, Any]) -> None:
    found = error_of(gpu=gpu, **kind)
    assert found.step_time == 0.045 and found.step_time_reason == ""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"gpu": "cpu", "precision": "fp32"}, "a CPU"),
        ({"gpu": "b200-sxm-180gb"}, "b200-sxm-180gb"),
        ({"gpu": "mi300x-192gb"}, "mi300x-192gb"),
        ({"config": MIXTURE}, "a mixture of experts"),
        ({"precision": "fp32"}, "fp32"),
        ({"lora": LORA}, "LoRA"),
        ({"offload": "optimizer"}, "offload: optimizer"),
        ({"schedule": "dualpipev"}, "schedule: dualpipev"),
        ({"zero_stage": 2}, "ZeRO-2 inside one node"),
        ({"zero_stage": 3, "nodes": 2}, "DeepSpeed's ZeRO-3 over several nodes"),
        ({"zero_stage": 1, "nodes": 49}, "DeepSpeed's ZeRO-1 over more than 48 nodes"),
        ({"zero_stage": 1, "nodes": 2, "target": "megatron"}, "Megatron-LM's ZeRO-1 over several nodes"),
    ],
)
def test_where_none_does(kind: dict[str, Any], reason: str) -> None:
    found = error_of(**kind)
    assert found == PredictionError(
        step_time=None, memory=None, step_time_reason=reason, memory_reason=found.memory_reason
    )
    assert found.memory_reason == reason and error_words(found).startswith(f"not calibrated ({reason}): ")


def test_a_gpu_of_the_recipes_own() -> None:
    recipe = recipe_of()
    cluster = resolve_cluster(recipe.cluster)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, name="inline"))
    found = prediction_error(problem_of(recipe, graph_of(SMALL_LLAMA), cluster), PLAIN)
    assert found.step_time_reason == "a GPU of your own numbers"


def test_time_and_memory_are_measured_apart() -> None:
    """PyTorch's FSDP over nodes was timed and not weighed."""
    found = error_of(nodes=16, zero_stage=3, kernels="hf")
    assert found.memory is None and found.memory_reason == "PyTorch's FSDP's ZeRO-3 over several nodes"
    assert error_words(found).startswith("the step ± 4.5%; the memory not calibrated (")


def test_the_table_is_of_the_rows() -> None:
    written = json.loads(resources.files("shardwright.cost").joinpath("measured.json").read_text("utf-8"))
    errors = {name: written[name]["error"] for name in ("time", "memory")}
    assert written == packaged(score.rows(ROWS), errors)
