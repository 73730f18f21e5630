"""Low precision under Megatron-Core: its configuration and Megatron-LM's parser take the arguments,
and with a stand-in for Transformer Engine the linears that are planned compute under the recipe.
No GPU has run the kernels for us."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.megatron import megatron_equivalence
from shardwright.engines.megatron.low_precision_recipes import (
    LOW_PRECISION_RECIPES,
    low_precision_settings,
)
from shardwright.plan.plan import Plan, PlanLowPrecision, plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from tests.megatron.test_arguments import LLAMA, asked, asked_of

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
)
HERE = Path(__file__).parent
DENSE = {**LLAMA, "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64}
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": DENSE, "mixtral": EXPERTS}
RECOMPUTED = {"llama": "none", "mixtral": "full"}
LAYOUT = {"tensor": 1, "pipeline": 1, "data": 1, "zero_stage": 1, "micro_batch_size": 1}
RECIPES = {
    "fp8_tensorwise": ["Float8CurrentScaling", "hybrid"],
    "fp8_blockwise": ["Float8BlockScaling", "e4m3"],
    "mxfp8": ["MXFP8BlockScaling", "e4m3"],
    "nvfp4": ["NVFP4BlockScaling", "e2m1"],
}
KEPT = {"nvfp4": (0, 1)}
"""Layers in bf16 at the start and at the end, of eight."""


def planned(
    name: str,
    config: dict[str, Any],
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    **changes: Any,
) -> Plan:
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    keys = {
        "target": "megatron",
        "model.config": config,
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "b200-sxm-180gb"},
        "training.precision": "bf16",
        "training.low_precision": name,
        "parallelism": LAYOUT,
        **changes,
    }
    return compile_recipe(load_recipe(write_recipe(keys))).plan


@pytest.mark.parametrize("name", LOW_PRECISION_RECIPES)
def test_transformer_config_takes_the_arguments(
    name: str, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checks, without Transformer Engine; it refuses FP8 experts without it."""
    from shardwright.engines.megatron.megatron_trainer import transformer_settings

    plan = planned(name, DENSE, write_recipe, monkeypatch)
    settings = transformer_settings(plan, AutoConfig.for_model(**DENSE))
    wanted = low_precision_settings(plan)
    assert {key: getattr(settings, key) for key in wanted} == wanted
    assert not settings.fp8_param and not settings.fp4_param
    assert (settings.fp8 is None) != (settings.fp4 is None)
    kept = (settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16)
    assert settings.first_last_layers_bf16 == (name in KEPT)
    assert kept == KEPT.get(name, (1, 1))  # Megatron-Core's defaults, which then do nothing


def test_what_transformer_config_refuses_is_a_diagnostic(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.engines.megatron.megatron_trainer import transformer_settings

    plan = planned(
        "mxfp8",
        DENSE,
        write_recipe,
        monkeypatch,
        cluster={"nodes": 1, "gpus_per_node": 4, "gpu": "b200-sxm-180gb"},
        parallelism={**LAYOUT, "pipeline": 4},
    )
    middle = PlanLowPrecision(format="mxfp8", modules=("model.layers.4.mlp.down_proj",), experts=())
    plan = dataclasses.replace(plan, low_precision=middle)
    with pytest.raises(Refusal) as caught:
        transformer_settings(plan, AutoConfig.for_model(**DENSE))
    (found,) = caught.value.diagnostics
    assert found.code == "SW6015" and "num_layers_at_start_in_bf16 (4)" in found.message


@pytest.mark.launch
def test_the_planned_linears_compute_under_the_recipe(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear of the layers between those in bf16, experts too; no router and no head."""
    cases = [(name, model) for name in RECIPES for model in MODELS]
    plans = [
        planned(
            name,
            MODELS[model],
            write_recipe,
            monkeypatch,
            parallelism={**LAYOUT, "activation_checkpointing": RECOMPUTED[model]},
        )
        for name, model in cases
    ]
    questions = [
        {"plan": json.loads(plan_to_json(plan)), "config": MODELS[model]}
        for plan, (_, model) in zip(plans, cases, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, HERE / "low_precision_worker.py"],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(cases), done.stderr[-3000:]
    attention = {"self_attention.linear_qkv", "self_attention.linear_proj"}
    for (name, model), plan, answer in zip(cases, plans, answers, strict=True):
        layers = answer["layers"]
        where = "mlp.experts." if model == "mixtral" else "mlp."
        linears = {*attention, f"{where}linear_fc1", f"{where}linear_fc2"}
        start, end = KEPT.get(name, (0, 0))
        for place, layer in enumerate(layers):
            kept = place < start or place >= len(layers) - end
            wanted = None if kept else RECIPES[name]
            assert layer == dict.fromkeys(linears, wanted), (name, model, place)
        assert plan.low_precision is not None
        assert set(answer["held"]) == plan.low_precision.weights, (name, model)
        assert bool(plan.low_precision.experts) == (model == "mixtral")


@pytest.mark.prove
def test_the_parser_takes_the_options_of_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Callable[..., None]
) -> None:
    """Compare with and without weights gathered in the format, pipelines and experts."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'stand_in'}:{os.environ.get('PYTHONPATH', '')}")
    piped = {"pipeline": 2, "data": 4, "virtual_stages": 2}
    layouts: list[dict[str, Any]] = [{"data": 8}, {"data": 8, "zero_stage": 0}, piped]
    layouts.append({"data": 8, "offload": "optimizer"})
    questions = []
    for name in LOW_PRECISION_RECIPES:
        for config in MODELS.values():
            for layout in layouts:
                document = {
                    "version": 1,
                    "name": "low",
                    "target": "megatron",
                    "model": {"config": config, "weights": "random"},
                    "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "b200-sxm-180gb"},
                    "training": {
                        "sequence_length": 1024,
                        "global_batch_size": 64,
                        "steps": 100,
                        "precision": "bf16",
                        "low_precision": name,
                    },
                    "data": {"kind": "synthetic"},
                    "parallelism": {**LAYOUT, **layout},
                }
                questions.append(asked_of(document, tmp_path)[0])
    texts = [" ".join(question["args"]) for question in questions]
    assert sum("--fp8-param-gather" in text for text in texts) == 3 * 2 * 2
    assert sum("--fp4-format e2m1" in text for text in texts) == 8
    answers = asked(questions)
    assert answers == [{}] * 32, [(q, a) for q, a in zip(questions, answers, strict=True) if a]
    proved("megatron-args", "low precision", {"accepted": len(answers)})
