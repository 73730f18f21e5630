"""`activation_checkpointing: [moe_act, layernorm]`: what a recipe may say, who refuses it, and what
Megatron-Core is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.megatron import megatron_equivalence, recompute_modules
from shardwright.engines.megatron.megatron_arguments import arguments_file, recompute_settings
from shardwright.engines.megatron.transformer_engine_layers import uses_transformer_engine
from shardwright.plan.plan import plan_from_json, plan_to_json
from shardwright.recipe.literal_types import RECOMPUTE_MODULES
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.verify.tiny_copy import tiny_strategy
from tests.unit.engines.test_megatron import EXPERTS, LAYOUT
from tests.unit.engines.test_transformer_engine import DEEPSEEK, LLAMA

GPU = {"target": "megatron", "cluster.gpu": "h100-sxm-80gb", "training.precision": "bf16"}
SHARED = {**DEEPSEEK, "n_shared_experts": 1}


def changes_of(modules: list[str], **more: Any) -> dict[str, Any]:
    parallelism = {**LAYOUT, "activation_checkpointing": modules}
    return {**GPU, "parallelism": parallelism, **{k.replace("__", "."): v for k, v in more.items()}}


def errors(write_recipe: Callable[..., Path], changes: dict[str, Any]) -> dict[str, str]:
    _, estimate = estimate_recipe(load_recipe(write_recipe(changes)))
    return {d.code: d.message for d in estimate.diagnostics if d.severity == "error"}


@pytest.mark.parametrize("modules", [["moe_act", "moe_act"], ["attention"], []], ids=str)
def test_a_list_names_each_module_once(
    modules: list[str], write_recipe: Callable[..., Path]
) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe(changes_of(modules)))
    (found,) = caught.value.diagnostics
    assert found.key is not None and found.key[:2] == ("parallelism", "activation_checkpointing")


def test_the_installed_version_says_which_modules_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_recipe: Callable[..., Path]
) -> None:
    accepted = recompute_modules.accepted_recompute_modules.__wrapped__
    text = 'allowed_modules = {\n    "core_attn",\n    "moe",\n}\n'
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "transformer_config.py").write_text(text)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert accepted() == {"core_attn", "moe"}
    monkeypatch.setattr(recompute_modules, "accepted_recompute_modules", accepted)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.30.0")
    found = errors(write_recipe, changes_of(["core_attn", "mlp"]))
    assert "mlp: megatron-core 0.30.0 recomputes only core_attn, moe" in found["SW3196"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert accepted() == set(RECOMPUTE_MODULES)


def test_what_megatron_is_given(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its TransformerConfig and its script take the list; moe_act takes grouped experts."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    changes = changes_of(["moe_act", "layernorm"], model__config=EXPERTS)
    plan = compile_recipe(load_recipe(write_recipe(changes))).plan
    assert plan.strategy.activation_checkpointing == ("moe_act", "layernorm")
    assert recompute_settings(plan) == {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act", "layernorm"],
        "moe_grouped_gemm": True,
    }
    again = plan_from_json(plan_to_json(plan))
    assert again.strategy == plan.strategy
    (text,) = arguments_file(plan, EXPERTS)[0].values()
    lines = [line.strip() for line in text.decode().splitlines()]
    assert "--recompute-modules moe_act layernorm" in lines and "--moe-grouped-gemm" in lines
    assert "--recompute-granularity selective" in lines
    changes = changes_of(["mlp"], model__config=LLAMA)
    assert "moe_grouped_gemm" not in recompute_settings(
        compile_recipe(load_recipe(write_recipe(changes))).plan
    )
    layout = plan.strategy
    assert layout.pins()["activation_checkpointing"] == ["moe_act", "layernorm"]
    assert "activation_checkpointing=[moe_act, layernorm]" in layout.describe()
    assert "SAC moe_act+layernorm" in layout.letters()
    assert tiny_strategy(layout).activation_checkpointing == ("layernorm",)
    alone = dataclasses.replace(layout, activation_checkpointing=("moe_act",))
    assert tiny_strategy(alone).activation_checkpointing == "none"


def test_moe_act_does_not_start_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda held, mine: held.__setitem__(0, mine)
    )
    monkeypatch.setattr(
        "shardwright.engines.megatron.transformer_engine_layers._absent", lambda: "it is missing"
    )
    for modules in ((), ("moe_act",)):
        plan: Any = SimpleNamespace(
            is_cpu=False,
            model=SimpleNamespace(transformer_engine="auto"),
            strategy=SimpleNamespace(world_size=1, recompute_modules=modules),
        )
        if not modules:
            assert uses_transformer_engine(plan) is False
            continue
        with pytest.raises(Refusal) as caught:
            uses_transformer_engine(plan)
        assert [d.code for d in caught.value.diagnostics] == ["SW6015"]
