"""Low precision under `target: megatron`: the formats that compile, the GPUs and layouts that have
them, the options of megatron_args.sh, and hosts without Transformer Engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.engines.megatron import megatron_equivalence, transformer_engine_layers
from shardwright.engines.megatron.low_precision_recipes import (
    LOW_PRECISION_RECIPES,
    bf16_layers,
)
from shardwright.engines.megatron.transformer_engine_layers import check_low_precision
from shardwright.plan.plan import Plan, PlanLowPrecision, plan_from_json, plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.training_rules import engine_recipe_errors
from tests.conftest import SMALL_RECIPE
from tests.unit.engines.test_megatron import LAYOUT
from tests.unit.engines.test_transformer_engine import DEEPSEEK, ON_GPUS, OVER_TENSOR, TEXT

LAYERS = {**SMALL_RECIPE["model"]["config"], "num_hidden_layers": 12}
LAYERS |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
B200 = {**ON_GPUS, "cluster.gpu": "b200-sxm-180gb", "model.config": LAYERS}


def compiled(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> tuple[Plan, list[tuple[str, ...]]]:
    """The plan, and megatron_args.sh's options of low precision."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    made = compile_recipe(load_recipe(write_recipe({**B200, **changes})))
    lines = made.files["megatron_args.sh"].decode().splitlines()
    parts = ("fp8", "fp4", "in-bf16", "layers-bf16")
    words = [tuple(shlex.split(line)) for line in lines if any(part in line for part in parts)]
    assert plan_from_json(plan_to_json(made.plan)) == made.plan
    return made.plan, words


OPTIONS: dict[str, list[tuple[str, ...]]] = {
    "fp8_tensorwise": [
        ("--fp8-format", "hybrid"),
        ("--fp8-recipe", "tensorwise"),
        ("--fp8-param-gather",),
    ],
    "fp8_blockwise": [
        ("--fp8-format", "e4m3"),
        ("--fp8-recipe", "blockwise"),
        ("--fp8-param-gather",),
    ],
    "mxfp8": [
        ("--fp8-format", "e4m3"),
        ("--fp8-recipe", "mxfp8"),
        ("--fp8-param-gather",),
        ("--reuse-grad-buf-for-mxfp8-param-ag",),
    ],
    "nvfp4": [
        ("--fp4-format", "e2m1"),
        ("--fp4-recipe", "nvfp4"),
        ("--num-layers-at-start-in-bf16", "0"),
        ("--num-layers-at-end-in-bf16", "2"),
        ("--first-last-layers-bf16",),
    ],
}


@pytest.mark.parametrize("name", LOW_PRECISION_RECIPES)
def test_the_options_of_each_format(
    name: str, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options = compiled(write_recipe, monkeypatch, {"training.low_precision": name})
    assert plan.low_precision is not None and plan.low_precision.format == name
    assert sorted(options) == sorted(OPTIONS[name])
    assert json.loads(plan_to_json(plan))["low_precision"]["format"] == name


@pytest.mark.parametrize("layout", [{"zero_stage": 0}, {"offload": "optimizer"}])
def test_weights_stay_in_bf16_where_the_distributed_optimizer_does_not_gather_them(
    layout: dict[str, Any], write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM takes FP8 weights beside an optimizer in host memory for delayed scales alone."""
    changes = {"training.low_precision": "mxfp8", "parallelism": {**LAYOUT, **layout}}
    _, options = compiled(write_recipe, monkeypatch, changes)
    assert options == [("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")]


def test_without_low_precision_nothing_is_written(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options = compiled(write_recipe, monkeypatch, {})
    assert plan.low_precision is None and options == []
    assert json.loads(plan_to_json(plan))["low_precision"] is None


@pytest.mark.parametrize(
    ("keep", "ends"),
    [
        ([], (0, 0)),
        (["model.layers.0"], (1, 0)),
        (["model.layers.11", "model.layers.10"], (0, 2)),
        (["model.layers.0", "model.layers.1", "model.layers.11"], (2, 1)),
        (["model.layers.1"], None),
        (["*.o_proj"], None),
        (["model.layers.0.mlp"], None),
        (["model.layers.0", "model.layers.5", "model.layers.11"], None),
    ],
)
def test_layers_at_the_ends_alone_are_kept(
    keep: list[str],
    ends: tuple[int, int] | None,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"training.low_precision": "fp8_blockwise", "training.low_precision_keep": keep}
    if ends is None:
        with pytest.raises(Refusal) as caught:
            compiled(write_recipe, monkeypatch, changes)
        assert [d.code for d in caught.value.diagnostics] == ["SW3179"]
        assert "`model.layers.0`, `model.layers.11`" in str(caught.value.diagnostics[0].help)
        return
    plan, options = compiled(write_recipe, monkeypatch, changes)
    assert bf16_layers(plan) == ends
    written: list[tuple[str, ...]] = [("--num-layers-at-start-in-bf16", str(ends[0]))]
    written += [("--num-layers-at-end-in-bf16", str(ends[1])), ("--first-last-layers-bf16",)]
    assert all((option in options) == (ends != (0, 0)) for option in written)


def told(
    write_recipe: Callable[..., Path], changes: dict[str, Any], name: str
) -> dict[str, Diagnostic]:
    recipe = load_recipe(write_recipe({**B200, **changes, "training.low_precision": name}))
    _, estimate = estimate_recipe(recipe)
    found = {d.code: d for d in estimate.diagnostics}
    return found | {d.code: d for d in engine_recipe_errors(ENGINES["megatron"], recipe)}


@pytest.mark.parametrize(
    ("gpu", "name", "nearest"),
    [
        ("a100-sxm4-80gb", "fp8_tensorwise", "Remove low_precision"),
        ("a100-sxm4-80gb", "nvfp4", "Remove low_precision"),
        ("h100-sxm-80gb", "fp8_tensorwise", ""),
        ("h100-sxm-80gb", "fp8_blockwise", ""),
        ("h100-sxm-80gb", "mxfp8", "fp8_blockwise"),
        ("h100-sxm-80gb", "nvfp4", "fp8_blockwise"),
        ("b200-sxm-180gb", "mxfp8", ""),
        ("b200-sxm-180gb", "nvfp4", ""),
    ],
)
def test_a_gpu_without_the_format_is_told_the_nearest(
    gpu: str, name: str, nearest: str, write_recipe: Callable[..., Path]
) -> None:
    found = told(write_recipe, {"cluster.gpu": gpu}, name)
    assert ("SW3185" in found) == bool(nearest)
    if nearest:
        assert gpu in found["SW3185"].message and nearest in str(found["SW3185"].help)
    else:
        assert f"whose {name} kernels no test has run" in str(found["SW3168"].help)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cluster.gpu": "cpu"}, "Transformer Engine's layers run only on GPUs"),
        ({"training.precision": "fp32"}, "does not run in fp32"),
        ({"data": {**TEXT, "packing": True}}, "need an attention mask"),
        ({"model.config": DEEPSEEK, "parallelism": OVER_TENSOR}, "latent"),
        ({"model.transformer_engine": "off"}, "model.transformer_engine is off"),
        ({}, ""),
    ],
)
def test_low_precision_needs_transformer_engines_layers(
    changes: dict[str, Any], why: str, write_recipe: Callable[..., Path]
) -> None:
    found = told(write_recipe, changes, "fp8_blockwise")
    assert ("SW3178" in found) == bool(why)
    if why:
        assert why in found["SW3178"].message and found["SW3178"].severity == "error"


def test_one_scale_a_row_is_refused(write_recipe: Callable[..., Path]) -> None:
    found = told(write_recipe, {}, "fp8_rowwise")
    assert "one scale for each row" in found["SW1922"].message
    assert found["SW1922"].valid == ("none", *LOW_PRECISION_RECIPES)
    assert {"SW3178", "SW3179"}.isdisjoint(found.keys())


class _Plan:
    """Hold what check_low_precision reads of one."""

    def __init__(self, name: str | None) -> None:
        self.low_precision = name and PlanLowPrecision(format=name, modules=(), experts=())


@pytest.mark.parametrize(
    ("name", "version", "why"),
    [
        (None, "", ""),
        ("mxfp8", "", "transformer_engine cannot be imported"),
        ("mxfp8", "2.1.0", ""),
        (
            "fp8_blockwise",
            "2.1.0",
            "needs Transformer Engine 2.3.0.dev0 or later, but 2.1.0 is installed",
        ),
        ("nvfp4", "2.6", "needs Transformer Engine 2.7.0.dev0 or later, but 2.6 is installed"),
        ("nvfp4", "2.9.0", ""),
    ],
)
def test_a_host_without_the_kernels_is_refused(
    name: str | None, version: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = "" if version else "transformer_engine cannot be imported"
    monkeypatch.setattr(transformer_engine_layers, "_absent", lambda: absent)
    monkeypatch.setattr(transformer_engine_layers, "_version", lambda: version)
    plan: Any = _Plan(name)
    if not why:
        check_low_precision(plan, taken=bool(version))
        return
    with pytest.raises(Refusal) as caught:
        check_low_precision(plan, taken=bool(version))
    (found,) = caught.value.diagnostics
    assert found.code == "SW6015" and why in found.message and str(name) in found.message
    assert "Install Transformer Engine" in str(found.help)
