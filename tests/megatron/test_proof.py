"""What a compile proves: the right model passes, each wrong one is told by its difference, at any
number of ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.engines.megatron import megatron_equivalence
from shardwright.plan.plan import plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
    ),
]
LLAMA: dict[str, Any] = SMALL_RECIPE["model"]["config"]
ROPE = {"rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
}  # not those of Llama 3.1
YARN = {**ROPE, "rope_type": "yarn"}
HALF = 8  # of a head's features
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [2.0] * HALF,
    "short_factor": [1.0] * HALF,
}
SHARED = {
    **LLAMA,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
LATENT = {
    **SHARED,
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MIXTURE = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DROPOUTS = dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0)
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
NUMBERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("", LLAMA, {}),
    "rope of other factors": ("", {**LLAMA, "rope_parameters": LLAMA3}, {}),
    "sliding windows": ("", {**LLAMA, "model_type": "mistral", "sliding_window": 8}, {}),
    "gemma": ("", {**LLAMA, "model_type": "gemma", "head_dim": 16}, {}),
    "qwen3": ("", {**LLAMA, "model_type": "qwen3", "head_dim": 16}, {}),
    "swapped": ("swapped keys and values", LLAMA, {"apart": "logits differ"}),
    "a bias": ("", {**LLAMA, "attention_bias": True}, {"unsupported": "attention_bias"}),
    "an unknown type": ("", {**LLAMA, "model_type": "olmo2"}, {"unsupported": "olmo2"}),
    "a dynamic rope": (
        "",
        {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "dynamic"}},
        {"unsupported": "rope_type dynamic"},
    ),
    "a longrope": (
        "",
        {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "rope_parameters": LONGROPE},
        {"unsupported": "rope_type longrope"},
    ),
    "one expert a token": (
        "",
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
        {"unsupported": "num_experts_per_tok 1"},
    ),
    "one expert a token, its weight as the router gives it": (
        "",
        {
            **LLAMA,
            **EXPERTS,
            "model_type": "qwen3_moe",
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
        },
        {},
    ),
    "yarn": ("", {**LLAMA, "rope_parameters": YARN}, {}),
    "yarn of a part of a head": (
        "",
        {**LLAMA, "model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_parameters": YARN},
        {"unsupported": "the rotary scaling"},
    ),
    "ministral": ("", {**LLAMA, "model_type": "ministral", "head_dim": 16}, {}),
    "cwm": ("", {**LLAMA, "model_type": "cwm", "head_dim": 16}, {}),
    "seed_oss": ("", {**LLAMA, **DROPOUTS, "model_type": "seed_oss", "head_dim": 16}, {}),
    "arcee": ("", {**LLAMA, "model_type": "arcee", "hidden_act": "relu2"}, {}),
    "phi3": ("", {**LLAMA, "model_type": "phi3", "pad_token_id": 0}, {}),
    "stablelm": ("", {**LLAMA, "model_type": "stablelm", "use_qkv_bias": True}, {}),
    "nemotron": (
        "",
        {**LLAMA, "model_type": "nemotron", "hidden_act": "relu2", "head_dim": 16},
        {},
    ),
    "starcoder2": (
        "",
        {**LLAMA, **DROPOUTS, "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"},
        {},
    ),
    "qwen2_moe": (
        "",
        {**LLAMA, **EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64},
        {},
    ),
    "dense layers before experts": (
        "",
        {
            **LLAMA,
            **EXPERTS,
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
        },
        {},
    ),
    "gpt_oss": (
        "",
        {
            **LLAMA,
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": YARN,
        },
        {},
    ),
    "deepseek_v3": ("", LATENT, {}),
    "deepseek_v3 by yarn": ("", {**LATENT, "rope_parameters": MSCALE}, {}),
    "deepseek_v3 without low-rank queries": ("", {**LATENT, "q_lora_rank": None}, {}),
    "deepseek_v2": (
        "",
        {**LATENT, "model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False},
        {},
    ),
    "glm4_moe": ("", {**SHARED, "model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True}, {}),
    "dots1": ("", {**SHARED, "model_type": "dots1", "head_dim": 16}, {}),
    "no layer with experts": (
        "",
        {**LATENT, "first_k_dense_replace": LLAMA["num_hidden_layers"]},
        {"unsupported": "first_k_dense_replace"},
    ),
    "groups weighed otherwise": (
        "",
        {**LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2},
        {"unsupported": "topk_group"},
    ),
}


def test_what_it_finds(write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    layout: dict[str, Any] = {
        "tensor": 2,
        "pipeline": 2,
        "data": 128,
        "zero_stage": 1,
        "micro_batch_size": 1,
    }
    changes: dict[str, Any] = {
        "target": "megatron",
        "parallelism": {**layout, "sequence_parallel": True},
    }
    cluster: dict[str, Any] = {"cluster": {"nodes": 64, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}}
    recipe = load_recipe(write_recipe({**changes, **cluster, "training.global_batch_size": 512}))
    plan = json.loads(plan_to_json(compile_recipe(recipe).plan))
    deepep = {**layout, "tensor": 1, "pipeline": 1, "data": 8, "expert": 4, "zero_stage": 1}
    deepep |= {"expert_dispatcher": "deepep", "expert_overlap": True}
    one_node = {**cluster["cluster"], "nodes": 1}
    changes = {"target": "megatron", "parallelism": deepep, "cluster": one_node}
    changes |= {"model.config": MIXTURE, "training.precision": "bf16"}
    recipe = load_recipe(write_recipe({**changes, "training.global_batch_size": 64}))
    flex = json.loads(plan_to_json(compile_recipe(recipe).plan))
    wrong = json.loads(json.dumps(plan))
    for rank in wrong["ranks"]:
        rank["parameter_bytes"] += 4
    questions = [[planted, config, None] for planted, config, _ in NUMBERS.values()]
    asked = [*questions, ["", MIXTURE, flex], ["", LLAMA, plan], ["", LLAMA, wrong]]
    script = Path(__file__).with_name("proof_worker.py")
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), done.stderr[-3000:]
    for (name, (_, _, wanted)), found in zip(NUMBERS.items(), answers, strict=False):
        assert found.keys() == wanted.keys(), (name, found)
        assert all(text in found[key] for key, text in wanted.items()), (name, found)
    # Without DeepEP here, its dispatcher is built for each layer and exchanges nothing.
    assert answers[-3] == {"flex": MIXTURE["num_hidden_layers"]}
    assert answers[-2] == {} and "bytes of parameters" in answers[-1]["layout"]
