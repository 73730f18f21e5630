"""Map rows of one rank's Hugging Face shards to Megatron's parameters, in both directions.

A rank's shard of a Hugging Face parameter is what the plan gives it
(layout.parameter_sharding.ParameterSharding). Megatron holds the same numbers in another order,
several parameters in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.engines.megatron import megatron_model_configs
from shardwright.engines.megatron.megatron_model_configs import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeads:
    """Hold a rank's query heads, key/value heads and features of a head."""

    query: int
    groups: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Map rows of Megatron's parameter to those of a Hugging Face shard.

    name: Hugging Face's, behind the layer's path
    hf_start: first row in the shard
    own: first row in Megatron's parameter
    count: number of rows; a row is everything behind the first dimension
    """

    name: str
    hf_start: int
    own: int
    count: int


RowSource = Callable[[int, RankHeads], list[RowRange]]
"""Returns the source of each row range, from (rows of Megatron's parameter on this rank, its
heads)."""


def copied_rows(name: str) -> RowSource:
    """Take all rows from one parameter."""
    return lambda rows, heads: [RowRange(name=name, hf_start=0, own=0, count=rows)]


def stacked_rows(*names: str) -> RowSource:
    """Stack equally many rows of each parameter: gate and up."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        each = rows // len(names)
        return [
            RowRange(name=name, hf_start=0, own=place * each, count=each)
            for place, name in enumerate(names)
        ]

    return rows_of


def grouped_qkv_rows(query: str, key: str, value: str) -> RowSource:
    """Interleave rows as in Megatron's linear_qkv: per key/value head its query heads, key and
    value."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        wide, found = heads.query // heads.groups * heads.size, []
        for group in range(heads.groups):
            own = group * (wide + 2 * heads.size)
            found.append(RowRange(name=query, hf_start=group * wide, own=own, count=wide))
            for place, name in enumerate((key, value)):
                start = own + wide + place * heads.size
                found.append(
                    RowRange(name=name, hf_start=group * heads.size, own=start, count=heads.size)
                )
        return found

    return rows_of


def fused_qkv_rows(name: str) -> RowSource:
    """Interleave rows as grouped_qkv_rows does, from one parameter with all queries, keys, values:
    GPT-2's."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        blocks = {
            "q": 0,
            "k": heads.query * heads.size,
            "v": (heads.query + heads.groups) * heads.size,
        }
        return [
            RowRange(name=name, hf_start=blocks[r.name] + r.hf_start, own=r.own, count=r.count)
            for r in grouped_qkv_rows("q", "k", "v")(rows, heads)
        ]

    return rows_of


# The model types that this engine builds: their settings, and their parameters' names.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMapping:
    """Describe a model type that this engine builds: its settings and its parameters' names.

    settings: returns the arguments of TransformerConfig
    stack: path of the decoder layers
    non_layer_weights, layer: Megatron's parameter -> where its rows come from, by Hugging Face's
        names; a layer's are relative to the layer on both sides. N stands for an expert's number:
        Hugging Face has all experts in one parameter
    learned_positions: positions are a learned table, not rotary
    scaled_embedding: the embedding is multiplied by the square root of the hidden size
    has_transposed_experts: experts' weights are (in, out), with interleaved columns of gate and up
    """

    settings: Callable[[Any], Settings]
    stack: str
    non_layer_weights: Mapping[str, RowSource]
    layer: Mapping[str, RowSource]
    learned_positions: bool = False
    scaled_embedding: bool = False
    has_transposed_experts: bool = False


def hf_config(document: Mapping[str, Any]) -> Any:
    """Build Hugging Face's configuration, whose class has defaults for what the document lacks."""
    from transformers import AutoConfig

    from shardwright.models.config_schema import decode_special_floats

    whole = dict(decode_special_floats(dict(document)))
    return AutoConfig.for_model(whole.pop("model_type"), **whole)


def _qkv(leaf: str) -> RowSource:
    return grouped_qkv_rows(*(f"self_attn.{p}_proj.{leaf}" for p in "qkv"))


def _weight_and_bias(own: str, theirs: str) -> dict[str, RowSource]:
    """A weight and its bias."""
    return {f"{own}.{leaf}": copied_rows(f"{theirs}.{leaf}") for leaf in ("weight", "bias")}


_OUTSIDE = {
    "embedding.word_embeddings.weight": copied_rows("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": copied_rows("model.norm.weight"),
    "output_layer.weight": copied_rows("lm_head.weight"),
}
_NORM_BIASES = {
    "input_layernorm.bias": copied_rows("input_layernorm.bias"),
    "pre_mlp_layernorm.bias": copied_rows("post_attention_layernorm.bias"),
}
_NORM_BIAS_OUTSIDE = {"decoder.final_layernorm.bias": copied_rows("model.norm.bias")}
_NORMS = {
    "input_layernorm.weight": copied_rows("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": copied_rows("post_attention_layernorm.weight"),
}
_OUT = {"self_attention.linear_proj.weight": copied_rows("self_attn.o_proj.weight")}
_ATTENTION = {**_NORMS, "self_attention.linear_qkv.weight": _qkv("weight"), **_OUT}
_LATENT = {
    **_NORMS,
    "self_attention.linear_q_proj.weight": copied_rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": copied_rows("self_attn.q_a_proj.weight"),
    "self_attention.linear_q_up_proj.weight": copied_rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": copied_rows("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.linear_kv_up_proj.weight": copied_rows("self_attn.kv_b_proj.weight"),
    "self_attention.q_layernorm.weight": copied_rows("self_attn.q_a_layernorm.weight"),
    "self_attention.kv_layernorm.weight": copied_rows("self_attn.kv_a_layernorm.weight"),
    **_OUT,
}
_GATED = {
    "mlp.linear_fc1.weight": stacked_rows("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": copied_rows("mlp.down_proj.weight"),
}
_PLAIN = {
    "mlp.linear_fc1.weight": copied_rows("mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": copied_rows("mlp.down_proj.weight"),
}
_EXPERTS = {
    "mlp.router.weight": copied_rows("mlp.gate.weight"),
    "mlp.experts.local_experts.N.linear_fc1.weight": copied_rows("mlp.experts.gate_up_proj"),
    "mlp.experts.local_experts.N.linear_fc2.weight": copied_rows("mlp.experts.down_proj"),
}


def _shared(path: str) -> dict[str, RowSource]:
    gate, up, down = (f"mlp.{path}.{p}_proj.weight" for p in ("gate", "up", "down"))
    return {
        "mlp.shared_experts.linear_fc1.weight": stacked_rows(gate, up),
        "mlp.shared_experts.linear_fc2.weight": copied_rows(down),
    }


_MOE_AFTER_DENSE = {
    **_GATED,
    **_EXPERTS,
    **_shared("shared_experts"),
    "mlp.router.expert_bias": copied_rows("mlp.gate.e_score_correction_bias"),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": _qkv("bias")}
_QK_NORMS = {
    "self_attention.q_layernorm.weight": copied_rows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": copied_rows("self_attn.k_norm.weight"),
}
_GPT_OSS = {
    **_ATTENTION,
    **_QKV_BIAS,
    "self_attention.linear_proj.bias": copied_rows("self_attn.o_proj.bias"),
    "self_attention.core_attention.softmax_offset": copied_rows("self_attn.sinks"),
    **_weight_and_bias("mlp.router", "mlp.router"),
    "mlp.experts.local_experts.N.linear_fc1.weight": copied_rows("mlp.experts.gate_up_proj"),
    "mlp.experts.local_experts.N.linear_fc1.bias": copied_rows("mlp.experts.gate_up_proj_bias"),
    "mlp.experts.local_experts.N.linear_fc2.weight": copied_rows("mlp.experts.down_proj"),
    "mlp.experts.local_experts.N.linear_fc2.bias": copied_rows("mlp.experts.down_proj_bias"),
}
_STARCODER2 = {
    **_ATTENTION,
    **_NORM_BIASES,
    **_QKV_BIAS,
    **_weight_and_bias("self_attention.linear_proj", "self_attn.o_proj"),
    **_weight_and_bias("mlp.linear_fc1", "mlp.c_fc"),
    **_weight_and_bias("mlp.linear_fc2", "mlp.c_proj"),
}
_PHI3 = {
    **_NORMS,
    **_OUT,
    "self_attention.linear_qkv.weight": fused_qkv_rows("self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": copied_rows("mlp.gate_up_proj.weight"),
    "mlp.linear_fc2.weight": copied_rows("mlp.down_proj.weight"),
}
_GPT2_LAYER = {
    f"{own}.{leaf}": (fused_qkv_rows if theirs == "attn.c_attn" else copied_rows)(
        f"{theirs}.{leaf}"
    )
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


def _llama_like_mapping(
    of: Callable[[Any], Settings],
    layer: Mapping[str, RowSource],
    non_layer_weights: Mapping[str, RowSource] = _OUTSIDE,
    **more: bool,
) -> ModelMapping:
    return ModelMapping(
        settings=of, stack="model.layers", non_layer_weights=non_layer_weights, layer=layer, **more
    )


MODEL_MAPPINGS: dict[str, ModelMapping] = {
    "llama": _llama_like_mapping(megatron_model_configs.llama, _ATTENTION | _GATED),
    "mistral": _llama_like_mapping(megatron_model_configs.llama, _ATTENTION | _GATED),
    "ministral": _llama_like_mapping(megatron_model_configs.llama, _ATTENTION | _GATED),
    "cwm": _llama_like_mapping(megatron_model_configs.llama, _ATTENTION | _GATED),
    "qwen2": _llama_like_mapping(megatron_model_configs.qwen2, _ATTENTION | _QKV_BIAS | _GATED),
    "qwen3": _llama_like_mapping(megatron_model_configs.qwen3, _ATTENTION | _QK_NORMS | _GATED),
    "seed_oss": _llama_like_mapping(
        megatron_model_configs.seed_oss, _ATTENTION | _QKV_BIAS | _GATED
    ),
    "arcee": _llama_like_mapping(megatron_model_configs.arcee, _ATTENTION | _PLAIN),
    "phi3": _llama_like_mapping(megatron_model_configs.gated, _PHI3),
    "gemma": _llama_like_mapping(
        megatron_model_configs.gemma, _ATTENTION | _GATED, scaled_embedding=True
    ),
    "stablelm": _llama_like_mapping(
        megatron_model_configs.stablelm,
        _ATTENTION | _NORM_BIASES | _QKV_BIAS | _GATED,
        _OUTSIDE | _NORM_BIAS_OUTSIDE,
    ),
    "nemotron": _llama_like_mapping(
        megatron_model_configs.nemotron,
        _ATTENTION | _NORM_BIASES | _PLAIN,
        _OUTSIDE | _NORM_BIAS_OUTSIDE,
    ),
    "starcoder2": _llama_like_mapping(
        megatron_model_configs.starcoder2, _STARCODER2, _OUTSIDE | _NORM_BIAS_OUTSIDE
    ),
    "mixtral": _llama_like_mapping(megatron_model_configs.mixtral, _ATTENTION | _EXPERTS),
    "qwen2_moe": _llama_like_mapping(
        megatron_model_configs.qwen2_moe,
        _ATTENTION
        | _QKV_BIAS
        | _EXPERTS
        | _shared("shared_expert")
        | {"mlp.shared_experts.gate_weight": copied_rows("mlp.shared_expert_gate.weight")},
    ),
    "qwen3_moe": _llama_like_mapping(
        megatron_model_configs.qwen3_moe, _ATTENTION | _QK_NORMS | _GATED | _EXPERTS
    ),
    "gpt_oss": _llama_like_mapping(
        megatron_model_configs.gpt_oss, _GPT_OSS, has_transposed_experts=True
    ),
    "deepseek_v2": _llama_like_mapping(
        megatron_model_configs.deepseek_v2, _LATENT | _MOE_AFTER_DENSE
    ),
    "deepseek_v3": _llama_like_mapping(
        megatron_model_configs.deepseek_v3, _LATENT | _MOE_AFTER_DENSE
    ),
    "glm4_moe": _llama_like_mapping(
        megatron_model_configs.glm4_moe, _ATTENTION | _QKV_BIAS | _QK_NORMS | _MOE_AFTER_DENSE
    ),
    "dots1": _llama_like_mapping(
        megatron_model_configs.dots1, _ATTENTION | _QK_NORMS | _MOE_AFTER_DENSE
    ),
    "gpt2": ModelMapping(
        settings=megatron_model_configs.gpt2,
        stack="transformer.h",
        non_layer_weights={
            "embedding.word_embeddings.weight": copied_rows("transformer.wte.weight"),
            "embedding.position_embeddings.weight": copied_rows("transformer.wpe.weight"),
            **_weight_and_bias("decoder.final_layernorm", "transformer.ln_f"),
            "output_layer.weight": copied_rows("lm_head.weight"),
        },
        layer=_GPT2_LAYER,
        learned_positions=True,
    ),
}
"""Maps model_type to its mapping."""
