"""Checks what Megatron-Core's recompute_modules save and cost: bytes by the modules' shapes, and
their forward passes once more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layer_shapes import activations, model_shapes
from shardwright.cost.peak_memory import estimate_memory
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import recomputed_flops_per_token
from shardwright.engines.run_profiles import KernelProfile, kernel_profile
from shardwright.layout.layout_estimate import Time
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import LayerCheckpointing, RecomputedModules
from shardwright.search.layout_resolution import estimate_checked_layout, with_stages_assigned
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

LENGTH, ELEMENT = 4096, 2
H, F, E, K = 4096, 1024, 16, 4
MIXTURE = {
    **LLAMA_8B,
    "model_type": "mixtral",
    "num_hidden_layers": 8,
    "num_local_experts": E,
    "num_experts_per_tok": K,
    "intermediate_size": F,
}
HEADS, NOPE, ROPE, VALUE = 32, 128, 64, 96
LATENT = {
    **LLAMA_8B,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 8,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": F,
    "n_shared_experts": 2,
}
MODELS: dict[str, dict[str, Any]] = {"dense": LLAMA_8B, "mixture": MIXTURE, "latent": LATENT}


def saved(graph: ModelGraph, mode: LayerCheckpointing, **more: Any) -> dict[str, float]:
    """Bytes of a token in the second, and in the last decoder layer."""
    kernels: KernelProfile = more.pop("kernels", KernelProfile())
    found = activations(graph, LENGTH, ELEMENT, mode, kernels, **more)
    layers = len(graph.layers)
    return {
        name: (of.replicated + of.sharded) / LENGTH
        for name, at in (("first", 2), ("last", layers - 2))
        for of in [found.between(at, at + 1)]
    }


def dropped(model: str, *modules: Any, at: str = "last", **more: Any) -> float:
    graph = graph_of(MODELS[model])
    kernels = {"kernels": more["kernels"]} if "kernels" in more else {}
    return saved(graph, "none", **kernels)[at] - saved(graph, modules, **more)[at]


SIZES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "two norms": (2 * H * 2, ("dense", "layernorm")),
    "experts' activation": (K * F * 2, ("mixture", "moe_act")),
    "norms and activation": (2 * H * 2 + K * F * 2, ("mixture", "layernorm", "moe_act")),
    "latent attention": (HEADS * (2 * (NOPE + ROPE) + VALUE) * 2, ("latent", "mla_up_proj")),
    "shared experts": (3 * 2 * F * 2, ("latent", "shared_experts")),
    "no dense layer": (0, ("mixture", "mlp")),
    "no experts": (0, ("dense", "moe", "moe_act", "shared_experts", "mla_up_proj")),
    "fused attention's log-sum-exp": (4 * HEADS, ("dense", "core_attn")),
}


@pytest.mark.parametrize("name", SIZES)
def test_bytes_of_a_token(name: str) -> None:
    wanted, (model, *modules) = SIZES[name]
    assert dropped(model, *modules) == pytest.approx(wanted)


def test_a_module_that_contains_others_counts_them_once() -> None:
    whole = dropped("latent", "moe")
    assert dropped("latent", "moe", "moe_act", "shared_experts") == pytest.approx(whole)
    assert whole > dropped("latent", "moe_act", "shared_experts") > 0
    # Of the first layers, which have no experts, the feed-forward network.
    assert dropped("latent", "moe", at="first") == 0
    assert dropped("latent", "mlp", at="first") > 0 == dropped("latent", "mlp")


def test_a_norm_inside_a_linear_saves_its_result() -> None:
    """Transformer Engine's linears contain the norm before them, but for experts and latent
    attention."""
    for model, left in ("dense", 0), ("mixture", 1), ("latent", 2):
        found = dropped(model, "layernorm", norms_are_fused=True)
        assert found == pytest.approx(left * H * 2), model


def test_scores_are_dropped_with_core_attention() -> None:
    formula = kernel_profile("megatron", "llama")
    assert not formula.traces_activations
    graph = dataclasses.replace(graph_of(LLAMA_8B), attention="eager")
    scores = (5 * HEADS + 1) // 2 * LENGTH * 2
    found = saved(graph, "none", kernels=formula)["last"]
    less = saved(graph, ("core_attn",), kernels=formula)["last"]
    assert found - less == pytest.approx(scores + 4 * HEADS)


def priced(model: str, mode: LayerCheckpointing, **layout: Any) -> PricedLayout:
    batch = change(**layout).data * change(**layout).gradient_accumulation_steps
    recipe = recipe_of(
        MODELS[model],
        target="megatron",
        training={"sequence_length": LENGTH, "global_batch_size": batch},
        assume={"ignore_memory": True},
    )
    return with_stages_assigned(
        problem_of(recipe, graph_of(MODELS[model])),
        change(**layout, activation_checkpointing=mode),
        UNBOUND_BY_HOST,
    )


UNBOUND_BY_HOST = dataclasses.replace(
    default_constants(), expert_host_seconds_alltoall=0.0, expert_host_seconds_deepep=0.0
)
"""Constants of a host that never bounds an expert layer: recomputation would hide behind it."""


def seconds_of(layout: PricedLayout) -> Time:
    return estimate_checked_layout(layout.problem, layout.strategy, (), UNBOUND_BY_HOST).time


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"pipeline": 1, "tensor": 1, "data": 8},
    "tensor": {"pipeline": 1, "tensor": 4, "data": 2, "sequence_parallel": True},
    "experts": {"pipeline": 1, "tensor": 1, "data": 8, "expert": 4},
    "context": {"pipeline": 1, "tensor": 1, "data": 4, "context": 2},
}
SETS: dict[str, list[RecomputedModules]] = {
    "dense": [("core_attn",), ("layernorm",), ("mlp",), ("layernorm", "mlp")],
    "mixture": [("moe_act",), ("moe_act", "layernorm"), ("moe",), ("moe", "layernorm")],
    "latent": [("mla_up_proj",), ("mla_up_proj", "moe_act"), ("shared_experts",), ("mlp", "moe")],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_between_none_and_full(model: str, layout: str) -> None:
    """Memory and time lie between those of no and of full recomputation, and what adds up to the
    step does."""
    axes = LAYOUTS[layout] | ({} if model != "dense" else {"expert": 1})
    ends: list[LayerCheckpointing] = ["none", "full"]
    none, full = (priced(model, mode, **axes) for mode in ends)
    most, least = (estimate_memory(each).stages[0].activations_bytes for each in (none, full))
    fast, slow = seconds_of(none), seconds_of(full)
    for modules in SETS[model]:
        some = priced(model, modules, **axes)
        saved_bytes = estimate_memory(some).stages[0].activations_bytes
        # Transformer Engine's linears contain a dense layer's norms.
        saves = (model, modules) != ("dense", ("layernorm",))
        assert least <= saved_bytes < most + (not saves), modules
        time = seconds_of(some)
        assert fast.step_seconds < time.step_seconds <= slow.step_seconds * 1.001, modules
        parts = [
            *(time.compute_seconds, time.tensor_comm_seconds, time.pipeline_comm_seconds),
            *(time.data_comm_seconds, time.optimizer_seconds, time.bubble_seconds),
        ]
        assert sum(parts) == pytest.approx(time.step_seconds, abs=1e-6)


def test_selective_is_core_attention() -> None:
    for model in MODELS:
        one, other = priced(model, "selective"), priced(model, ("core_attn",))
        assert estimate_memory(one) == estimate_memory(other)
        assert seconds_of(one) == seconds_of(other)


def test_collectives_of_a_recomputed_module_run_again() -> None:
    """A mixture's all-to-alls, a feed-forward network's all-reduce, context ranks' exchange."""

    def comm(model: str, mode: LayerCheckpointing, **axes: Any) -> float:
        return seconds_of(priced(model, mode, **axes)).tensor_comm_seconds

    expert = LAYOUTS["experts"]
    assert comm("mixture", ("moe",), **expert) == pytest.approx(
        1.5 * comm("mixture", "none", **expert)
    )
    assert comm("mixture", ("moe_act",), **expert) == comm("mixture", "none", **expert)
    tensor = LAYOUTS["tensor"]
    assert comm("dense", ("mlp",), **tensor) > comm("dense", "none", **tensor)
    assert comm("mixture", ("mlp",), **tensor) == comm("mixture", "none", **tensor)
    context = LAYOUTS["context"]
    assert comm("dense", ("core_attn",), **context) == pytest.approx(
        1.5 * comm("dense", "none", **context)
    )
    assert comm("dense", ("mlp",), **context) == comm("dense", "none", **context)


def test_what_is_recomputed_is_counted_in_the_hardware_flops() -> None:
    modes: list[LayerCheckpointing] = ["none", ("mlp",), ("core_attn", "mlp"), "full"]
    none, feed_forward, both, full = (
        recomputed_flops_per_token(priced("dense", mode)) for mode in modes
    )
    shapes = model_shapes(graph_of(LLAMA_8B), 1)
    products, projections, scores = shapes.decoder_flops
    assert (none, feed_forward) == (0, products - projections)
    assert both - feed_forward == scores * LENGTH and full == both + projections
