"""Where GPU ranks may take Megatron-Core's layers of Transformer Engine, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import estimate_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.megatron import transformer_engine_layers
from shardwright.engines.megatron.transformer_engine_layers import (
    layers_log_line,
    local_layer_name,
    uses_transformer_engine,
)
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.runnable_recipes import check_runnable
from tests.conftest import SMALL_RECIPE
from tests.unit.engines.test_megatron import EXPERTS, LAYOUT

LLAMA: dict[str, Any] = SMALL_RECIPE["model"]["config"]
ON_GPUS = {
    "target": "megatron",
    "cluster.gpu": "h100-sxm-80gb",
    "training.precision": "bf16",
    "parallelism": LAYOUT,
}
TEXT = {"kind": "text", "path": "python-stdlib", "tokenizer": "byte"}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DEEPSEEK = {
    **LLAMA,
    **LATENT,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
WINDOWS = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
OVER_TENSOR = {**LAYOUT, "tensor": 2, "data": 2, "sequence_parallel": True}
OVER_CONTEXT = {**LAYOUT, "context": 2, "data": 2}
KEPT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "over tensor and context ranks": (
        {"parallelism": {**OVER_TENSOR, "context": 2, "data": 1}},
        "",
    ),
    "experts": ({"model.config": EXPERTS}, ""),
    "windows": ({"model.config": WINDOWS}, ""),
    "latent attention": ({"model.config": DEEPSEEK}, ""),
    "rows of one stream": ({"data": {**TEXT, "packing": False}}, ""),
    "CPU ranks": ({"cluster.gpu": "cpu"}, "layers run only on GPUs"),
    "fp32": ({"training.precision": "fp32"}, "does not run in fp32"),
    "packed documents": ({"data": {**TEXT, "packing": True}}, "need an attention mask"),
    "packed validation": (
        {
            "validation": {
                "kind": "text",
                "path": "*.txt",
                "tokenizer": "byte",
                "packing": True,
                "every_steps": 1,
            }
        },
        "need an attention mask",
    ),
    "GPT-OSS": ({"model.config": OSS}, "'gpt_oss' run only in this project's own layers"),
    "latent attention over tensor ranks": (
        {"model.config": DEEPSEEK, "parallelism": OVER_TENSOR},
        "latent",
    ),
    "latent attention over context ranks": (
        {"model.config": DEEPSEEK, "parallelism": OVER_CONTEXT},
        "latent",
    ),
    "windows over context ranks": (
        {"model.config": WINDOWS, "parallelism": OVER_CONTEXT},
        "does not support the model's sliding windows",
    ),
    "whole experts over tensor ranks": (
        {"model.config": EXPERTS, "parallelism": {**OVER_TENSOR, "expert_tensor": 1}},
        "gradient norm",
    ),
}


def told(write_recipe: Callable[..., Path], changes: dict[str, Any]) -> dict[str, Any]:
    _, estimate = estimate_recipe(load_recipe(write_recipe({**ON_GPUS, **changes})))
    return {d.code: d for d in estimate.diagnostics}


@pytest.mark.parametrize(("changes", "why"), KEPT_OUT.values(), ids=KEPT_OUT)
def test_what_keeps_it_out(
    changes: dict[str, Any], why: str, write_recipe: Callable[..., Path]
) -> None:
    """`auto` takes this project's layers then and says why; `on` is refused."""
    auto, on = (
        told(write_recipe, {**changes, "model.transformer_engine": wish}) for wish in ("auto", "on")
    )
    assert "SW3169" not in auto and ("SW3169" in on) == bool(why)
    if why:
        assert why in on["SW3169"].message
    if changes.get("cluster.gpu") != "cpu":
        assert (why in auto["SW3168"].help) and (
            "The run uses Transformer Engine's layers" in auto["SW3168"].help
        ) == (not why)


def test_off_keeps_it_out(write_recipe: Callable[..., Path]) -> None:
    found = told(write_recipe, {"model.transformer_engine": "off"})
    assert ", without Transformer Engine." in found["SW3168"].help and "SW3169" not in found


@pytest.mark.parametrize(
    ("target", "wish", "refused"),
    [
        ("deepspeed", "on", True),
        ("deepspeed", "off", False),
        ("reference", "on", True),
        ("megatron", "on", False),
    ],
)
def test_other_engines(
    target: str, wish: str, refused: bool, write_recipe: Callable[..., Path]
) -> None:
    recipe = load_recipe(write_recipe({"target": target, "model.transformer_engine": wish}))
    assert ("SW1925" in [d.code for d in check_runnable(recipe)]) == refused


@pytest.mark.parametrize(
    ("theirs", "plain"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        (
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight",
        ),
        ("mlp.experts.linear_fc1.weight11", "mlp.experts.local_experts.11.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
        ("input_layernorm.weight", "input_layernorm.weight"),
    ],
)
def test_both_spellings(theirs: str, plain: str) -> None:
    assert local_layer_name(theirs) == plain


class _Plan:
    """What uses_transformer_engine reads of one."""

    def __init__(self, wish: str) -> None:
        self.model = dataclasses.make_dataclass("Model", ["transformer_engine"])(wish)
        self.strategy = dataclasses.make_dataclass("Layout", ["world_size", "recompute_modules"])(
            2, ()
        )
        self.is_cpu = False


@pytest.mark.parametrize(
    ("wish", "absent", "others", "taken"),
    [
        ("auto", "", None, True),
        ("on", "", None, True),
        ("off", "", None, False),
        ("auto", "transformer_engine cannot be imported", None, False),
        (
            "on",
            "transformer_engine cannot be imported",
            None,
            "is on, but transformer_engine cannot be imported",
        ),
        ("auto", "", "transformer_engine cannot be imported", "differs between ranks"),
        ("auto", "", "transformer_engine 2.10", "differs between ranks"),
    ],
)
def test_what_the_ranks_take(
    wish: str, absent: str, others: str | None, taken: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import distributed as dist

    def gather(into: list[str], mine: str) -> None:
        into[:] = [mine, others or mine]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(transformer_engine_layers, "_absent", lambda: absent)
    monkeypatch.setattr(transformer_engine_layers, "_version", lambda: "2.9")
    plan: Any = _Plan(wish)
    if isinstance(taken, str):
        with pytest.raises(Refusal) as caught:
            uses_transformer_engine(plan)
        (found,) = caught.value.diagnostics
        assert found.code == "SW6015" and taken in found.message
        return
    assert uses_transformer_engine(plan) is taken
    line = layers_log_line(plan, taken=taken)
    assert ("not tested on GPUs" in line) == taken and (absent in line)
