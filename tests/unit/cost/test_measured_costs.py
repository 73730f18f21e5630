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
    hardware_of,
    prediction_error,
    regime_text,
    regimes,
    workload_of,
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


EXPERTS: dict[str, Any] = {"config": MIXTURE, "target": "megatron"}


@pytest.mark.parametrize(
    "kind",
    [
        {"gpu": "a100-sxm4-40gb"},
        {"gpu": "a100-sxm4-40gb", "zero_stage": 3},
        {"gpu": "a100-sxm4-40gb", "nodes": 48},
        {"gpu": "h100-sxm-80gb", **EXPERTS},
        {"gpu": "b200-sxm-180gb", **EXPERTS},
    ],
)
def test_where_runs_stand_behind_it(kind: dict[str, Any]) -> None:
    found, layout = error_of(**kind), layout_of(**kind)
    words, _, wider = found.step_time_regime.partition("; as wide as ")
    name, _, runs = words.rpartition(": ")
    bands = error_benchmark().time.bands
    band = bands[name]
    assert name in regimes(layout) and band.runs >= LEAST_RUNS and band.sources >= LEAST_SOURCES
    assert runs == f"{band.runs} runs" and name.endswith(generation_of(kind["gpu"]))
    engine = engine_title(layout.recipe.target, layout.recipe.assume.kernels)
    own = bands.get(f"{engine}, {workload_of(layout)}, {hardware_of(layout)}")
    expected = own if wider and own is not None else band
    assert found.step_time == expected.half_width > 0 and found.step_time_reason == ""
    assert not wider or (own is not None and wider == f"{own.runs} of {engine}")
    # The narrowest one: those before it have too few runs.
    for other in regimes(layout)[: regimes(layout).index(name)]:
        assert other not in bands or not bands[other].has_enough_runs
    assert regime_text(found) == found.step_time_regime
    assert error_json_fields(found)["time"]["step_error_fraction"] == found.step_time


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"gpu": "cpu", "precision": "fp32"}, "a CPU"),
        ({"gpu": "mi300x-192gb"}, "DeepSpeed, plain, CDNA 3"),
        ({"precision": "fp32"}, "fp32"),
        ({"lora": LORA}, "LoRA"),
        ({"schedule": "dualpipev", "gradient_accumulation_steps": 4}, "schedule: dualpipev"),
        ({"config": MIXTURE}, "DeepSpeed, experts, Ampere"),
        (
            {"config": MIXTURE, "gpu": "h100-sxm-80gb", "zero_stage": 3},
            "DeepSpeed, experts, Hopper",
        ),
        ({"config": MIXTURE, "target": "megatron"}, "Megatron-LM, experts, Ampere"),
        ({"offload": "optimizer", "pipeline": 1, "data": 4}, "DeepSpeed, offload, Ampere"),
        ({"gpu": "h100-sxm-80gb"}, "DeepSpeed, plain, Hopper"),
        ({"gpu": "b200-sxm-180gb"}, "DeepSpeed, plain, Blackwell"),
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
            assert len({name.rpartition(", ")[2] for name in names}) == 1
            counts = [runs.bands[name].runs for name in names if name in runs.bands]
            assert counts == sorted(counts)


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
