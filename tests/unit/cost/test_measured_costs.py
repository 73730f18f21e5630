"""± is that of the narrowest regime with enough published runs, and stands where such runs are of
its kind."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.prediction_errors import (
    LEAST_RUNS,
    LEAST_SOURCES,
    error_benchmark,
    error_json_fields,
    generation_of,
    prediction_error,
    regime_text,
    regimes,
)
from shardwright.cost.priced_layout import PricedLayout
from shardwright.engines.engine_table import engine_title
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import PredictionError
from shardwright.recipe.recipe_types import LoraSection
from shardwright.report.plan_sentences import error_bar_text
from shardwright.search.layout_resolution import with_stages_assigned
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of
from tools.fit_cost.bench_cost import half_width

MIXTURE: dict[str, JsonValue] = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
PLAIN = Layout(
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
) -> PricedLayout:
    recipe = recipe_of(
        config,
        cluster={"gpu": gpu, "nodes": nodes},
        training={"precision": precision},
        assume={"kernels": kernels},
    )
    recipe = dataclasses.replace(recipe, lora=lora, target=target)
    strategy = dataclasses.replace(PLAIN, **layout)
    return with_stages_assigned(
        problem_of(recipe, graph_of(config or SMALL_LLAMA)), strategy, default_constants()
    )


def error_of(**kind: Any) -> PredictionError:
    return prediction_error(layout_of(**kind))


@pytest.mark.parametrize("gpu", ["a100-sxm4-40gb", "h100-sxm-80gb"])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"zero_stage": 3},
        {"nodes": 48},
        {"nodes": 16, "zero_stage": 3, "kernels": "hf"},
        {"target": "megatron"},
    ],
)
def test_where_runs_stand_behind_it(gpu: str, kind: dict[str, Any]) -> None:
    found = error_of(gpu=gpu, **kind)
    layout = layout_of(gpu=gpu, **kind)
    words, _, wider = found.step_time_regime.partition("; as wide as ")
    name, _, runs = words.rpartition(": ")
    band, generation = error_benchmark().time.bands[name], generation_of(gpu)
    here = band.gpus[generation]
    assert name in regimes(layout) and band.runs >= LEAST_RUNS and band.sources >= LEAST_SOURCES
    assert runs == f"{band.runs} runs" + (
        "" if here == band.runs else f", {here} of them on {generation}"
    )
    engine = engine_title(layout.recipe.target, layout.recipe.assume.kernels)
    own = error_benchmark().time.bands[f"{engine}, plain"]
    assert (
        found.step_time == (own if wider else band).half_width > 0 and found.step_time_reason == ""
    )
    assert not wider or (wider == f"{own.runs} of {engine}" and own.half_width > band.half_width)
    # The narrowest one: those before it have too few runs, or none on such GPUs.
    for other in regimes(layout)[: regimes(layout).index(name)]:
        narrower = error_benchmark().time.bands.get(other)
        assert narrower is None or not narrower.has_enough_runs or generation not in narrower.gpus
    assert regime_text(found) == found.step_time_regime
    assert error_json_fields(found)["time"]["step_error_fraction"] == found.step_time


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"gpu": "cpu", "precision": "fp32"}, "a CPU"),
        ({"gpu": "mi300x-192gb"}, "mi300x-192gb"),
        ({"precision": "fp32"}, "fp32"),
        ({"lora": LORA}, "LoRA"),
        ({"schedule": "dualpipev", "gradient_accumulation_steps": 4}, "schedule: dualpipev"),
        ({"config": MIXTURE}, "DeepSpeed, experts"),
        ({"config": MIXTURE, "gpu": "h100-sxm-80gb", "zero_stage": 3}, "DeepSpeed, experts"),
        ({"config": MIXTURE, "target": "megatron"}, "Megatron-LM, experts"),
        ({"offload": "optimizer", "pipeline": 1, "data": 4}, "DeepSpeed, offload"),
        ({"gpu": "b200-sxm-180gb"}, "DeepSpeed, plain, b200-sxm-180gb"),
    ],
)
def test_where_none_does(kind: dict[str, Any], reason: str) -> None:
    found = error_of(**kind)
    assert (found.step_time, found.memory) == (None, None)
    assert found.step_time_reason == found.memory_reason == reason
    assert error_bar_text(found).startswith(f"not calibrated ({reason}): ")
    assert regime_text(found) == f"not calibrated ({reason})"
    fields = error_json_fields(found)
    assert (
        fields["time"]["step_error_fraction"] is None
        and fields["memory"]["peak_error_fraction"] is None
    )


def test_a_gpu_of_the_recipes_own() -> None:
    recipe = recipe_of()
    cluster = resolve_cluster(recipe.cluster)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, name="inline"))
    found = prediction_error(
        with_stages_assigned(
            problem_of(recipe, graph_of(SMALL_LLAMA), cluster), PLAIN, default_constants()
        )
    )
    assert found.step_time_reason == "an inline GPU"


def test_regimes_are_nested() -> None:
    """Each has the runs of those inside it, and none has runs of another kind."""
    for runs in (error_benchmark().time, error_benchmark().memory):
        for kind in ({}, {"kernels": "hf"}, {"config": MIXTURE}, {"target": "megatron"}):
            names = regimes(layout_of(**kind))
            assert all(f", {'experts' if 'config' in kind else 'plain'}" in name for name in names)
            counts = [runs.bands[name].runs for name in names if name in runs.bands]
            assert counts == sorted(counts)
        assert all(sum(band.gpus.values()) == band.runs for band in runs.bands.values())


def test_the_half_width_holds_eighty_percent() -> None:
    errors = [0.01 * i for i in range(1, 101)]
    found = half_width(errors)
    assert sum(e <= found + 1e-9 for e in errors) in (80, 81)
    assert half_width([0.3]) == 0.3


def test_the_file_is_of_the_bench() -> None:
    written = json.loads(
        resources.files("shardwright.cost").joinpath("prediction_errors.json").read_text("utf-8")
    )
    assert (
        written["time"]["runs"] == error_benchmark().time.runs >= 600
        and written["projects"] == error_benchmark().projects
    )
