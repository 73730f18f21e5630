"""The model types that this engine builds: Hugging Face's configuration as TransformerConfig's arguments, and its
parameters' names. That a configuration really computes the same is proved at every compile, on a tiny copy (prove.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.engines.megatron.pieces import Source, fused, grouped, same, stacked


class Unsupported(Exception):
    """What of a configuration Megatron-Core does not have. The text begins with the key and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """settings: of TransformerConfig. stack: the decoder layers' path. outside, layer: Megatron's parameter (of a layer
    behind `decoder.layers.N.`) -> where its rows come from, by Hugging Face's names (of a layer behind its path). An
    expert's number is N there: Hugging Face has all of them in one parameter, one behind the other.

    learned_positions: a table of them, no rotary ones. scaled_embedding: by the square root of the hidden size.
    """

    settings: Callable[[Any], dict[str, Any]]
    stack: str
    outside: Mapping[str, Source]
    layer: Mapping[str, Source]
    learned_positions: bool = False
    scaled_embedding: bool = False


def configuration(document: Mapping[str, Any]) -> Any:
    """Hugging Face's object: its attributes have names that the document may lack."""
    from transformers import AutoConfig

    from shardwright.hf.floats import untagged

    whole = dict(untagged(dict(document)))
    return AutoConfig.for_model(whole.pop("model_type"), **whole)


def _activation(name: str) -> Callable[..., Any]:
    from functools import partial

    import torch.nn.functional as F

    known: dict[str, Callable[..., Any]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    }
    if name not in known:
        raise Unsupported(f"the activation {name!r}: known are {', '.join(known)}")
    return known[name]


def _refuse(config: Any, **plain: Any) -> None:
    """plain: key -> the one value that Megatron has."""
    for key, value in plain.items():
        if getattr(config, key, value) not in (value, None):
            raise Unsupported(f"{key} {getattr(config, key)}: Megatron-Core has {value} alone")


def _windows(config: Any) -> dict[str, Any]:
    """A key is seen from fewer than sliding_window places behind it."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return {}
    chosen = [int(kind == "sliding_attention") for kind in kinds] if kinds else None
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": chosen}


def _llama(config: Any) -> dict[str, Any]:
    _refuse(config, attention_bias=False, mlp_bias=False)
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(config.hidden_act),
        "add_bias_linear": False,
        **_windows(config),
    }


def _gemma(config: Any) -> dict[str, Any]:
    _refuse(config, use_bidirectional_attention=False)
    return {**_llama(config), "layernorm_zero_centered_gamma": True}


def _gpt2(config: Any) -> dict[str, Any]:
    _refuse(config, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, scale_attn_weights=True)
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "num_query_groups": config.n_head,
        "kv_channels": config.n_embd // config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": _activation(config.activation_function),
        "add_bias_linear": True,
    }


def _experts(config: Any, count: int, features: int) -> dict[str, Any]:
    """Softmax over all experts and over those chosen, scaled to one, are the same numbers."""
    return {
        **_llama(config),
        "num_moe_experts": count,
        "moe_ffn_hidden_size": features,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def _mixtral(config: Any) -> dict[str, Any]:
    _refuse(config, router_jitter_noise=0.0)
    return _experts(config, config.num_local_experts, config.intermediate_size)


def _qwen3_moe(config: Any) -> dict[str, Any]:
    _refuse(config, decoder_sparse_step=1, mlp_only_layers=[])
    return {**_experts(config, config.num_experts, config.moe_intermediate_size), "qk_layernorm": True}


_OUTSIDE = {
    "embedding.word_embeddings.weight": same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": same("lm_head.weight"),
}
_ATTENTION = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": grouped(*(f"self_attn.{p}_proj.weight" for p in "qkv")),
    "self_attention.linear_proj.weight": same("self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
_GATED = {
    "mlp.linear_fc1.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}
_EXPERTS = {
    "mlp.router.weight": same("mlp.gate.weight"),
    "mlp.experts.local_experts.N.linear_fc1.weight": same("mlp.experts.gate_up_proj"),
    "mlp.experts.local_experts.N.linear_fc2.weight": same("mlp.experts.down_proj"),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": grouped(*(f"self_attn.{p}_proj.bias" for p in "qkv"))}
_QK_NORMS = {
    "self_attention.q_layernorm.weight": same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": same("self_attn.k_norm.weight"),
}
_GPT2_LAYER = {
    f"{own}.{leaf}": (fused if theirs == "attn.c_attn" else same)(f"{theirs}.{leaf}")
    for own, theirs in (
        ("input_layernorm", "ln_1"),
        ("self_attention.linear_qkv", "attn.c_attn"),
        ("self_attention.linear_proj", "attn.c_proj"),
        ("pre_mlp_layernorm", "ln_2"),
        ("mlp.linear_fc1", "mlp.c_fc"),
        ("mlp.linear_fc2", "mlp.c_proj"),
    )
    for leaf in ("weight", "bias")
}


def _like_llama(
    settings: Callable[[Any], dict[str, Any]], layer: Mapping[str, Source], *, scaled_embedding: bool = False
) -> Family:
    return Family(
        settings=settings, stack="model.layers", outside=_OUTSIDE, layer=layer, scaled_embedding=scaled_embedding
    )


FAMILIES: dict[str, Family] = {
    "llama": _like_llama(_llama, _ATTENTION | _GATED),
    "mistral": _like_llama(_llama, _ATTENTION | _GATED),
    "qwen2": _like_llama(lambda c: {**_llama(c), "add_qkv_bias": True}, _ATTENTION | _QKV_BIAS | _GATED),
    "qwen3": _like_llama(lambda c: {**_llama(c), "qk_layernorm": True}, _ATTENTION | _QK_NORMS | _GATED),
    "gemma": _like_llama(_gemma, _ATTENTION | _GATED, scaled_embedding=True),
    "mixtral": _like_llama(_mixtral, _ATTENTION | _EXPERTS),
    "qwen3_moe": _like_llama(_qwen3_moe, _ATTENTION | _QK_NORMS | _EXPERTS),
    "gpt2": Family(
        settings=_gpt2,
        stack="transformer.h",
        outside={
            "embedding.word_embeddings.weight": same("transformer.wte.weight"),
            "embedding.position_embeddings.weight": same("transformer.wpe.weight"),
            "decoder.final_layernorm.weight": same("transformer.ln_f.weight"),
            "decoder.final_layernorm.bias": same("transformer.ln_f.bias"),
            "output_layer.weight": same("lm_head.weight"),
        },
        layer=_GPT2_LAYER,
        learned_positions=True,
    ),
}
"""By model_type."""
