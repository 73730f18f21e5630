"""± is that of the narrowest regime with enough published runs, and stands where such runs are of its kind."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import pytest

from shardwright.cluster.resolve import resolve_cluster
from shardwright.cost.constants import default_constants
from shardwright.cost.layout import Layout
from shardwright.cost.measured import LEAST_RUNS, bench, error_words, prediction_error, regime_words, regimes, widest
from shardwright.ir.json_value import JsonValue
from shardwright.ir.lora import LoraSection
from shardwright.layout.estimate import PredictionError
from shardwright.layout.strategy import Strategy
from shardwright.search.settle import place
from tests.unit.model.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of
from tools.fit_cost.bench import half_width

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


def layout_of(
    *,
    gpu: Any = "a100-sxm4-80gb",
    nodes: int = 1,
    config: dict[str, JsonValue] | None = None,
    precision: str = "bf16",
    kernels: str = "auto",
    lora: LoraSection | None = None,
    target: str = "deepspeed",
    **layout: Any,
) -> Layout:
    recipe = recipe_of(
        config, cluster={"gpu": gpu, "nodes": nodes}, training={"precision": precision}, assume={"kernels": kernels}
    )
    recipe = dataclasses.replace(recipe, lora=lora, target=target)
    strategy = dataclasses.replace(PLAIN, **layout)
    return place(problem_of(recipe, graph_of(config or SMALL_LLAMA)), strategy, default_constants())


def error_of(**kind: Any) -> PredictionError:
    return prediction_error(layout_of(**kind))


@pytest.mark.parametrize("gpu", ["a100-sxm4-40gb", "h100-sxm-80gb"])
@pytest.mark.parametrize(
    "kind",
    [{}, {"zero_stage": 3}, {"nodes": 48}, {"nodes": 16, "zero_stage": 3, "kernels": "hf"}, {"config": MIXTURE}],
)
def test_where_runs_stand_behind_it(gpu: str, kind: dict[str, Any]) -> None:
    found = error_of(gpu=gpu, **kind)
    layout = layout_of(gpu=gpu, **kind)
    name, _, runs = found.step_time_regime.rpartition(": ")
    band = bench().time.bands[name]
    assert name in regimes(layout) and runs == f"{band.runs} runs" and band.runs >= LEAST_RUNS
    assert found.step_time == band.half_width > 0 and found.step_time_reason == ""
    # The narrowest one: those before it have too few runs.
    before = regimes(layout)[: regimes(layout).index(name)]
    assert all(n not in bench().time.bands or bench().time.bands[n].runs < LEAST_RUNS for n in before)
    assert regime_words(found) == found.step_time_regime and widest(found)[0] == found.step_time


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"gpu": "cpu", "precision": "fp32"}, "a CPU"),
        ({"gpu": "mi300x-192gb"}, "mi300x-192gb"),
        ({"precision": "fp32"}, "fp32"),
        ({"lora": LORA}, "LoRA"),
        ({"schedule": "dualpipev", "gradient_accumulation_steps": 4}, "schedule: dualpipev"),
    ],
)
def test_where_none_does(kind: dict[str, Any], reason: str) -> None:
    found = error_of(**kind)
    assert (found.step_time, found.memory) == (None, None)
    assert found.step_time_reason == found.memory_reason == reason
    assert error_words(found).startswith(f"not calibrated ({reason}): ")
    assert regime_words(found) == f"not calibrated ({reason})"
    assert widest(found) == (bench().time.widest, bench().memory.widest)
    assert bench().time.widest == max(b.half_width for b in bench().time.bands.values() if b.runs >= LEAST_RUNS)


def test_a_gpu_of_the_recipes_own() -> None:
    recipe = recipe_of()
    cluster = resolve_cluster(recipe.cluster)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, name="inline"))
    found = prediction_error(place(problem_of(recipe, graph_of(SMALL_LLAMA), cluster), PLAIN, default_constants()))
    assert found.step_time_reason == "a GPU of your own numbers"


def test_regimes_are_nested() -> None:
    """Each has the runs of those inside it."""
    for runs in (bench().time, bench().memory):
        everything = runs.bands[regimes(layout_of())[-1]]
        assert everything.runs == runs.runs
        for name, band in runs.bands.items():
            outer, comma, _ = name.partition(", ")
            if comma and outer in runs.bands:
                assert band.runs <= runs.bands[outer].runs


def test_the_half_width_holds_eighty_percent() -> None:
    errors = [0.01 * i for i in range(1, 101)]
    found = half_width(errors)
    assert sum(e <= found + 1e-9 for e in errors) in (80, 81)
    assert half_width([0.3]) == 0.3


def test_the_file_is_of_the_bench() -> None:
    written = json.loads(resources.files("shardwright.cost").joinpath("measured.json").read_text("utf-8"))
    assert written["time"]["runs"] == bench().time.runs >= 600 and written["projects"] == bench().projects
