"""The model types that this engine builds: their settings, and their parameters' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.engines.megatron import megatron_model_configs
from shardwright.engines.megatron.megatron_model_configs import Settings, Unsupported
from shardwright.engines.megatron.megatron_weight_rows import Source, fused, grouped, same, stacked

__all__ = ["FAMILIES", "Family", "Unsupported", "configuration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """settings: of TransformerConfig. stack: the decoder layers' path. outside, layer: Megatron's
    parameter (of a layer behind `decoder.layers.N.`) -> where its rows come from, by Hugging Face's
    names (of a layer behind its path). An expert's number is N there: Hugging Face has all of them
    in one parameter, one behind the other.

    learned_positions: a table of them, no rotary ones. scaled_embedding: by the square root of the
    hidden size. columns: experts' weights are (in, out), the columns of gate and up by turns.
    """

    settings: Callable[[Any], Settings]
    stack: str
    outside: Mapping[str, Source]
    layer: Mapping[str, Source]
    learned_positions: bool = False
    scaled_embedding: bool = False
    columns: bool = False


def configuration(document: Mapping[str, Any]) -> Any:
    """Hugging Face's object: its attributes have names that the document may lack."""
    from transformers import AutoConfig

    from shardwright.models.config_special_floats import untagged

    whole = dict(untagged(dict(document)))
    return AutoConfig.for_model(whole.pop("model_type"), **whole)


def _qkv(leaf: str) -> Source:
    return grouped(*(f"self_attn.{p}_proj.{leaf}" for p in "qkv"))


def _both(own: str, theirs: str) -> dict[str, Source]:
    """A weight and its bias."""
    return {f"{own}.{leaf}": same(f"{theirs}.{leaf}") for leaf in ("weight", "bias")}


_OUTSIDE = {
    "embedding.word_embeddings.weight": same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": same("model.norm.weight"),
    "output_layer.weight": same("lm_head.weight"),
}
_NORM_BIASES = {
    "input_layernorm.bias": same("input_layernorm.bias"),
    "pre_mlp_layernorm.bias": same("post_attention_layernorm.bias"),
}
_NORM_BIAS_OUTSIDE = {"decoder.final_layernorm.bias": same("model.norm.bias")}
_NORMS = {
    "input_layernorm.weight": same("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": same("post_attention_layernorm.weight"),
}
_OUT = {"self_attention.linear_proj.weight": same("self_attn.o_proj.weight")}
_ATTENTION = {**_NORMS, "self_attention.linear_qkv.weight": _qkv("weight"), **_OUT}
_LATENT = {
    **_NORMS,
    "self_attention.linear_q_proj.weight": same("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": same("self_attn.q_a_proj.weight"),
    "self_attention.linear_q_up_proj.weight": same("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": same("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.linear_kv_up_proj.weight": same("self_attn.kv_b_proj.weight"),
    "self_attention.q_layernorm.weight": same("self_attn.q_a_layernorm.weight"),
    "self_attention.kv_layernorm.weight": same("self_attn.kv_a_layernorm.weight"),
    **_OUT,
}
_GATED = {
    "mlp.linear_fc1.weight": stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}
_PLAIN = {
    "mlp.linear_fc1.weight": same("mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
}
_EXPERTS = {
    "mlp.router.weight": same("mlp.gate.weight"),
    "mlp.experts.local_experts.N.linear_fc1.weight": same("mlp.experts.gate_up_proj"),
    "mlp.experts.local_experts.N.linear_fc2.weight": same("mlp.experts.down_proj"),
}


def _shared(path: str) -> dict[str, Source]:
    gate, up, down = (f"mlp.{path}.{p}_proj.weight" for p in ("gate", "up", "down"))
    return {
        "mlp.shared_experts.linear_fc1.weight": stacked(gate, up),
        "mlp.shared_experts.linear_fc2.weight": same(down),
    }


_BEHIND_DENSE = {
    **_GATED,
    **_EXPERTS,
    **_shared("shared_experts"),
    "mlp.router.expert_bias": same("mlp.gate.e_score_correction_bias"),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": _qkv("bias")}
_QK_NORMS = {
    "self_attention.q_layernorm.weight": same("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": same("self_attn.k_norm.weight"),
}
_GPT_OSS = {
    **_ATTENTION,
    **_QKV_BIAS,
    "self_attention.linear_proj.bias": same("self_attn.o_proj.bias"),
    "self_attention.core_attention.softmax_offset": same("self_attn.sinks"),
    **_both("mlp.router", "mlp.router"),
    "mlp.experts.local_experts.N.linear_fc1.weight": same("mlp.experts.gate_up_proj"),
    "mlp.experts.local_experts.N.linear_fc1.bias": same("mlp.experts.gate_up_proj_bias"),
    "mlp.experts.local_experts.N.linear_fc2.weight": same("mlp.experts.down_proj"),
    "mlp.experts.local_experts.N.linear_fc2.bias": same("mlp.experts.down_proj_bias"),
}
_STARCODER2 = {
    **_ATTENTION,
    **_NORM_BIASES,
    **_QKV_BIAS,
    **_both("self_attention.linear_proj", "self_attn.o_proj"),
    **_both("mlp.linear_fc1", "mlp.c_fc"),
    **_both("mlp.linear_fc2", "mlp.c_proj"),
}
_PHI3 = {
    **_NORMS,
    **_OUT,
    "self_attention.linear_qkv.weight": fused("self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": same("mlp.gate_up_proj.weight"),
    "mlp.linear_fc2.weight": same("mlp.down_proj.weight"),
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
    of: Callable[[Any], Settings],
    layer: Mapping[str, Source],
    outside: Mapping[str, Source] = _OUTSIDE,
    **more: bool,
) -> Family:
    return Family(settings=of, stack="model.layers", outside=outside, layer=layer, **more)


FAMILIES: dict[str, Family] = {
    "llama": _like_llama(megatron_model_configs.llama, _ATTENTION | _GATED),
    "mistral": _like_llama(megatron_model_configs.llama, _ATTENTION | _GATED),
    "ministral": _like_llama(megatron_model_configs.llama, _ATTENTION | _GATED),
    "cwm": _like_llama(megatron_model_configs.llama, _ATTENTION | _GATED),
    "qwen2": _like_llama(megatron_model_configs.qwen2, _ATTENTION | _QKV_BIAS | _GATED),
    "qwen3": _like_llama(megatron_model_configs.qwen3, _ATTENTION | _QK_NORMS | _GATED),
    "seed_oss": _like_llama(megatron_model_configs.seed_oss, _ATTENTION | _QKV_BIAS | _GATED),
    "arcee": _like_llama(megatron_model_configs.arcee, _ATTENTION | _PLAIN),
    "phi3": _like_llama(megatron_model_configs.gated, _PHI3),
    "gemma": _like_llama(megatron_model_configs.gemma, _ATTENTION | _GATED, scaled_embedding=True),
    "stablelm": _like_llama(
        megatron_model_configs.stablelm,
        _ATTENTION | _NORM_BIASES | _QKV_BIAS | _GATED,
        _OUTSIDE | _NORM_BIAS_OUTSIDE,
    ),
    "nemotron": _like_llama(
        megatron_model_configs.nemotron,
        _ATTENTION | _NORM_BIASES | _PLAIN,
        _OUTSIDE | _NORM_BIAS_OUTSIDE,
    ),
    "starcoder2": _like_llama(
        megatron_model_configs.starcoder2, _STARCODER2, _OUTSIDE | _NORM_BIAS_OUTSIDE
    ),
    "mixtral": _like_llama(megatron_model_configs.mixtral, _ATTENTION | _EXPERTS),
    "qwen2_moe": _like_llama(
        megatron_model_configs.qwen2_moe,
        _ATTENTION
        | _QKV_BIAS
        | _EXPERTS
        | _shared("shared_expert")
        | {"mlp.shared_experts.gate_weight": same("mlp.shared_expert_gate.weight")},
    ),
    "qwen3_moe": _like_llama(
        megatron_model_configs.qwen3_moe, _ATTENTION | _QK_NORMS | _GATED | _EXPERTS
    ),
    "gpt_oss": _like_llama(megatron_model_configs.gpt_oss, _GPT_OSS, columns=True),
    "deepseek_v2": _like_llama(megatron_model_configs.deepseek_v2, _LATENT | _BEHIND_DENSE),
    "deepseek_v3": _like_llama(megatron_model_configs.deepseek_v3, _LATENT | _BEHIND_DENSE),
    "glm4_moe": _like_llama(
        megatron_model_configs.glm4_moe, _ATTENTION | _QKV_BIAS | _QK_NORMS | _BEHIND_DENSE
    ),
    "dots1": _like_llama(megatron_model_configs.dots1, _ATTENTION | _QK_NORMS | _BEHIND_DENSE),
    "gpt2": Family(
        settings=megatron_model_configs.gpt2,
        stack="transformer.h",
        outside={
            "embedding.word_embeddings.weight": same("transformer.wte.weight"),
            "embedding.position_embeddings.weight": same("transformer.wpe.weight"),
            **_both("decoder.final_layernorm", "transformer.ln_f"),
            "output_layer.weight": same("lm_head.weight"),
        },
        layer=_GPT2_LAYER,
        learned_positions=True,
    ),
}
"""By model_type."""
