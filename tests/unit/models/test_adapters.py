"""Adapters are tried on a tiny copy when a recipe with LoRA is compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.models import lora_target_paths as adapters
from shardwright.models import model_probe
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.zoo.configs import tiny_config


def compiled(model_type: str, folder: Path) -> Plan:
    document = {
        "version": 1,
        "name": "adapters",
        "model": {"config": tiny_config(model_type), "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
        "training": {"sequence_length": 16, "global_batch_size": 1, "steps": 1},
        "data": {"kind": "text", "path": "python-stdlib", "tokenizer": "byte", "packing": False},
        "lora": {"rank": 2, "alpha": 8},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    return compile_recipe(load_recipe(path)).plan


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3"])
def test_adapters_that_train_are_compiled(model_type: str, tmp_path: Path) -> None:
    assert compiled(model_type, tmp_path).lora is not None


def test_layers_that_do_not_run_with_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="does not run with them") as refused:
        compiled("deepseek_v4", tmp_path)
    assert [d.code for d in refused.value.diagnostics] == ["SW3221"]


@pytest.mark.parametrize(
    ("model_type", "module"), [("mamba", "dt_proj"), ("longcat_flash", "classifier")]
)
def test_adapters_that_the_forward_goes_around_are_refused(
    model_type: str, module: str, tmp_path: Path
) -> None:
    with pytest.raises(Refusal, match=f"never calls '{module}'") as refused:
        compiled(model_type, tmp_path)
    assert [d.code for d in refused.value.diagnostics] == ["SW3221"]


def test_adapters_of_another_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = adapters.lora_config

    def doubled(section: Any, **more: Any) -> Any:
        return plain(dataclasses.replace(section, alpha=2 * section.alpha), **more)

    monkeypatch.setattr(adapters, "lora_config", doubled)
    model_probe._why_not_adapted.cache_clear()
    try:
        with pytest.raises(Refusal, match="its logits are not those of W") as refused:
            compiled("llama", tmp_path)
    finally:
        model_probe._why_not_adapted.cache_clear()
    assert refused.value.diagnostics[0].code == "SW3221"
