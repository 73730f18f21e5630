"""The plain run that `verify` compares with: adapters at exact paths, and what the recipe
freezes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.recipe.recipe_types import LoraSection
from shardwright.verify import layout_verification, tiny_copy
from shardwright.verify.reference_run import merge_reference_lora
from tests.zoo.configs import tiny_config

IDS = torch.arange(3, 19)[None]


@dataclass(frozen=True, eq=False)
class StubGraph:
    """Stands in for a ModelGraph, whose answers are cached by hash."""

    cut: Any
    layers: list[Any]
    tied: tuple[str, ...]
    identity: str


def adapted(
    model_type: str, lora: LoraSection | None, freeze: tuple[str, ...] = (), **config: Any
) -> nn.Module:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**tiny_config(model_type), **config})
    )
    stack = "transformer.h" if model_type == "gpt2" else "model.layers"
    plan: Any = SimpleNamespace(model=SimpleNamespace(cut=SimpleNamespace(stack=stack)))
    layout_verification._freeze_and_adapt(model.eval(), plan, SimpleNamespace(lora=lora), freeze)  # type: ignore[arg-type]
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("deepseek_v3", {"first_k_dense_replace": 1}), ("qwen3_moe", {}), ("gpt2", {})],
)
def test_each_linear_has_an_adapter_and_nothing_else(
    model_type: str, config: dict[str, Any]
) -> None:
    lora = LoraSection(rank=2, alpha=6, dropout=0.0, target_modules=None)
    model = adapted(model_type, lora, **config)
    kinds = ("Linear", "Conv1D")
    linears = {
        n for n, m in model.named_modules() if type(m).__name__ in kinds and ".lora_" not in n
    } - {"lm_head"}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {f"{n}.lora_{x}.default.weight" for n in linears for x in "AB"}
    with torch.no_grad():
        for p in trained.values():
            p.copy_(torch.randn_like(p) * 0.05)
        logits = model(input_ids=IDS, use_cache=False).logits
        merged = merge_reference_lora(model, dict(model.named_parameters()), 3.0)
        plain = adapted(model_type, None, **config)
        plain.load_state_dict({n: p for n, p in merged.items() if "lora_" not in n}, strict=False)
        assert torch.allclose(logits, plain(input_ids=IDS, use_cache=False).logits, atol=1e-5)
        for p in trained.values():
            p.zero_()
        assert not torch.allclose(logits, model(input_ids=IDS, use_cache=False).logits, atol=1e-3)


def test_what_the_recipe_freezes_is_frozen() -> None:
    model = adapted("llama", None, ("*norm*", "model.layers.1", "model.embed_tokens.weight"))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        n
        for n, _ in model.named_parameters()
        if "norm" in n or ".layers.1." in n or n == "model.embed_tokens.weight"
    }


def test_the_tiny_copy_is_frozen_at_the_same_share_of_its_depth() -> None:
    layers = [f"model.layers.{n}.mlp.weight" for n in range(32)]
    parameters = [SimpleNamespace(name=name) for name in ("model.embed.weight", *layers)]
    graph: Any = StubGraph(
        cut=SimpleNamespace(stack="model.layers"),
        layers=[SimpleNamespace(kind="decoder", parameters=parameters)],
        tied=(),
        identity="32 layers",
    )
    names = ("model.embed.weight", *(f"model.layers.{n}.mlp.weight" for n in range(4)))
    half = tuple(f"model.layers.{n}.*" for n in range(16))
    assert tiny_copy.tiny_freeze(graph, half, names) == names[1:3]
    assert tiny_copy.tiny_freeze(graph, ("model.embed", "*.mlp.*"), names) == (
        names[0],
        "model.layers.*.mlp.weight",
    )
    assert tiny_copy.tiny_freeze(graph, (), names) == ()
