"""Convert Hugging Face configurations to TransformerConfig's arguments, a function for each family.

Every compile verifies a configuration on a tiny copy (megatron_equivalence.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]


class Unsupported(Exception):
    """Report what of a configuration Megatron-Core lacks.

    The text begins with the key and its value.
    """


def activation(name: str) -> Callable[..., Any]:
    """Return the activation function. Raises Unsupported."""
    from functools import partial

    import torch.nn.functional as F

    known: dict[str, Callable[..., Any]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu2": _squared_relu,
    }
    if name not in known:
        raise Unsupported(f"the activation {name!r} is not one of {', '.join(known)}")
    return known[name]


def _squared_relu(x: Any) -> Any:
    return x.relu().square()


def require_values(config: Any, **plain: Any) -> None:
    """Raise Unsupported where a key has another value than the one that Megatron supports."""
    for key, value in plain.items():
        if getattr(config, key, value) not in (value, None):
            raise Unsupported(
                f"{key} is {getattr(config, key)}, but Megatron-Core supports only {value}"
            )


def windows(config: Any) -> Settings:
    """Return the sliding window: a query attends to fewer than sliding_window places before it."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return {}
    chosen = [int(kind == "sliding_attention") for kind in kinds] if kinds else None
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": chosen}


def common_sizes(config: Any) -> Settings:
    """Return the sizes that most model types name alike."""
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "activation_func": activation(config.hidden_act),
        "add_bias_linear": False,
    }


def llama(config: Any) -> Settings:
    require_values(config, attention_bias=False, mlp_bias=False)
    return gated(config)


def gated(config: Any) -> Settings:
    return {
        **common_sizes(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        **windows(config),
    }


def qwen2(config: Any) -> Settings:
    return {**llama(config), "add_qkv_bias": True}


def qwen3(config: Any) -> Settings:
    return {**llama(config), "qk_layernorm": True}


def gemma(config: Any) -> Settings:
    require_values(config, use_bidirectional_attention=False)
    return {**llama(config), "layernorm_zero_centered_gamma": True}


def seed_oss(config: Any) -> Settings:
    require_values(config, attention_bias=True, attention_out_bias=False, mlp_bias=False)
    return {**gated(config), "add_qkv_bias": True}


def stablelm(config: Any) -> Settings:
    require_values(config, use_parallel_residual=False, qk_layernorm=False)
    norm = {"normalization": "LayerNorm", "layernorm_epsilon": config.layer_norm_eps}
    return {
        **common_sizes(config),
        **norm,
        "gated_linear_unit": True,
        "add_qkv_bias": bool(config.use_qkv_bias),
    }


def arcee(config: Any) -> Settings:
    return {**llama(config), "gated_linear_unit": False}


def nemotron(config: Any) -> Settings:
    require_values(config, attention_bias=False, mlp_bias=False)
    norm = {
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.norm_eps,
        "layernorm_zero_centered_gamma": True,
    }
    return {**common_sizes(config), **norm}


def starcoder2(config: Any) -> Settings:
    require_values(config, use_bias=True)
    norm = {"normalization": "LayerNorm", "layernorm_epsilon": config.norm_epsilon}
    return {**common_sizes(config), **norm, "add_bias_linear": True, **windows(config)}


def gpt2(config: Any) -> Settings:
    require_values(
        config,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        scale_attn_weights=True,
    )
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "num_query_groups": config.n_head,
        "kv_channels": config.n_embd // config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": activation(config.activation_function),
        "add_bias_linear": True,
    }


def _experts(config: Any, count: int, features: int) -> Settings:
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": features,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _softmax(config: Any) -> Settings:
    """Softmax over all experts and over those chosen, scaled to one, are the same numbers. Of one
    expert the number is 1, which Megatron-Core refuses (TransformerConfig.__post_init__: no
    gradient reaches the router)."""
    is_scaled = getattr(config, "norm_topk_prob", True)
    if is_scaled and config.num_experts_per_tok == 1:
        other = ", or norm_topk_prob: false" if hasattr(config, "norm_topk_prob") else ""
        raise Unsupported(
            "num_experts_per_tok 1: the chosen expert's weight is always 1, so no gradient reaches "
            f"the router; Megatron-Core needs 2 or more experts a token{other}"
        )
    return {"moe_router_pre_softmax": not is_scaled}


def mixtral(config: Any) -> Settings:
    require_values(config, router_jitter_noise=0.0)
    return {
        **llama(config),
        **_experts(config, config.num_local_experts, config.intermediate_size),
        **_softmax(config),
    }


def qwen2_moe(config: Any) -> Settings:
    require_values(config, decoder_sparse_step=1, mlp_only_layers=[], qkv_bias=True)
    shared = {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    sizes = _experts(config, config.num_experts, config.moe_intermediate_size)
    return {**qwen2(config), **sizes, **shared, **_softmax(config)}


def qwen3_moe(config: Any) -> Settings:
    require_values(config, decoder_sparse_step=1)
    dense = [layer in config.mlp_only_layers for layer in range(config.num_hidden_layers)]
    frequency = {"moe_layer_freq": [int(not d) for d in dense]} if any(dense) else {}
    sizes = _experts(config, config.num_experts, config.moe_intermediate_size)
    return {**qwen3(config), **sizes, **_softmax(config), **frequency}


def gpt_oss(config: Any) -> Settings:
    """Sinks, biases everywhere, a gate that is cut off (arXiv 2508.10925)."""
    from functools import partial

    require_values(config, attention_bias=True)
    return {
        **gated(config),
        **_experts(config, config.num_local_experts, config.intermediate_size),
        **_softmax(config),
        "add_bias_linear": True,
        "activation_func": partial(quick_gelu, slope=config.swiglu_alpha),
        "activation_func_clamp_value": config.swiglu_limit,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


def quick_gelu(x: Any, slope: float) -> Any:
    return x * (x * slope).sigmoid()


def _moe_after_dense_layers(config: Any) -> Settings:
    """The first layers of DeepSeek's kind have one feed-forward network, the others experts and
    some that all tokens share."""
    dense = config.first_k_dense_replace
    if dense >= config.num_hidden_layers:
        raise Unsupported(f"first_k_dense_replace {dense} leaves no layer with experts")
    features = config.moe_intermediate_size
    return {
        **_experts(config, config.n_routed_experts, features),
        "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": features * config.n_shared_experts
        if config.n_shared_experts
        else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def _sigmoid(config: Any) -> Settings:
    """DeepSeek-V3's router (arXiv 2412.19437, 2.1.2), the bias as the checkpoint has it: no forward
    pass of Hugging Face's moves it. Megatron weighs a group by its best topk / group_topk experts,
    Hugging Face by two (megatron/core/transformer/moe/moe_utils.py, group_limited_topk)."""
    require_values(config, norm_topk_prob=True)
    groups, chosen, topk = config.n_group, config.topk_group, config.num_experts_per_tok
    if groups > 1 and topk // chosen != 2:
        raise Unsupported(
            f"topk_group {chosen} with {topk} experts a token: Megatron-Core would rank a group by "
            f"its best {topk // chosen} experts, Hugging Face by its best 2"
        )
    return {
        **_moe_after_dense_layers(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        **(
            {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
        ),
    }


def _latent(config: Any) -> Settings:
    """Multi-head latent attention (arXiv 2405.04434, 2.1)."""
    import math

    require_values(config, attention_bias=False, mlp_bias=False)
    rope = getattr(config, "rope_parameters", None) or {}
    piped = rope.get("rope_type", "default") != "default"
    whole = rope.get("mscale_all_dim", 0) if piped else 0
    stretch = rope.get("factor", 1.0) if piped else 1.0
    if not math.isfinite(stretch):
        raise Unsupported(f"rope_parameters.factor {stretch} is not finite")
    return {
        **gated(config),
        "kv_channels": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "num_query_groups": config.num_attention_heads,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": stretch,
        "mscale_all_dim": float(whole or 0.0),
    }


def deepseek_v3(config: Any) -> Settings:
    require_values(config, rope_interleave=True)
    return {**_latent(config), **_sigmoid(config)}


def deepseek_v2(config: Any) -> Settings:
    require_values(config, topk_method="greedy", norm_topk_prob=False)
    return {**_latent(config), **_moe_after_dense_layers(config), "moe_router_pre_softmax": True}


def glm4_moe(config: Any) -> Settings:
    bias = {"add_qkv_bias": True} if config.attention_bias else {}
    return {**gated(config), **_sigmoid(config), **bias, "qk_layernorm": bool(config.use_qk_norm)}


def dots1(config: Any) -> Settings:
    require_values(config, attention_bias=False)
    return {**gated(config), **_sigmoid(config), "qk_layernorm": True}
