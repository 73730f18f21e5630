"""Tensor-parallel maps of our own, for families that transformers ships no plan for, and what its
plans leave out.

Paths are relative to the base model, * is any number. `tests/zoo` proves them like every other.
"""

from __future__ import annotations

from collections.abc import Mapping

_QKV = ("q_proj", "k_proj", "v_proj")
_BLOOM = (
    "h.*",
    "self_attention",
    ("query_key_value",),
    "dense",
    ("mlp.dense_h_to_4h",),
    "mlp.dense_4h_to_h",
)


def _decoder_layer(
    layer: str,
    attention: str,
    qkv: tuple[str, ...],
    out: str,
    up: tuple[str, ...],
    down: str,
    style: str = "colwise",
) -> dict[str, str]:
    """Attention over a share of the heads, feed-forward over a share of the features. style: of
    `qkv`."""
    attention = f"{layer}.{attention}"
    return {
        attention: "local_heads",
        **{f"{attention}.{name}": style for name in qkv},
        f"{attention}.{out}": "rowwise",
        **{f"{layer}.{name}": "colwise" for name in up},
        f"{layer}.{down}": "rowwise",
    }


TP_PLANS: dict[str, Mapping[str, str]] = {
    "gpt2": _decoder_layer(
        "h.*", "attn", ("c_attn",), "c_proj", ("mlp.c_fc",), "mlp.c_proj", "fused_qkv_colwise"
    ),
    "opt": _decoder_layer("decoder.layers.*", "self_attn", _QKV, "out_proj", ("fc1",), "fc2"),
    # Fused q, k, v one behind the other within each head, so that heads are cut plainly. ALiBi
    # comes per head.
    "bloom": _decoder_layer(*_BLOOM),
    # Fused per key/value head; with one such head (7b) `multi_query_colwise` is put in its place.
    "falcon": _decoder_layer(*_BLOOM, "grouped_qkv_colwise"),
    "gpt_bigcode": _decoder_layer(
        "h.*", "attn", ("c_attn",), "c_proj", ("mlp.c_fc",), "mlp.c_proj", "grouped_qkv_colwise"
    ),
    "stablelm": _decoder_layer(
        "layers.*", "self_attn", _QKV, "o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
    ),
    "gptj": _decoder_layer("h.*", "attn", _QKV, "out_proj", ("mlp.fc_in",), "mlp.fc_out"),
    "gpt_neo": _decoder_layer(
        "h.*", "attn.attention", _QKV, "out_proj", ("mlp.c_fc",), "mlp.c_proj"
    ),
    "mpt": _decoder_layer(
        "blocks.*",
        "attn",
        ("Wqkv",),
        "out_proj",
        ("ffn.up_proj",),
        "ffn.down_proj",
        "fused_qkv_colwise",
    ),
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        # Gate and up stand next to each other, feature by feature.
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
    },
}
TP_PLANS["gpt-sw3"] = TP_PLANS["gpt2"]

_LATENT_ATTENTION: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""As transformers' plan of DeepSeek-V2; its plans of later models leave the attention out."""

TP_PLAN_ADDITIONS: dict[str, Mapping[str, str]] = {
    # Learned numbers of the activation, which each rank applies to its own features.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "axk1": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "youtu": _LATENT_ATTENTION,
    # A norm with a row for every head.
    "cohere": {
        "layers.*.self_attn.q_norm.weight": "colwise",
        "layers.*.self_attn.k_norm.weight": "colwise",
    },
    # Norms that each rank applies to its own heads.
    "glm4_moe": {
        f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce"
        for norm in ("q_norm", "k_norm")
    },
    "phi": {
        f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce"
        for norm in ("q_layernorm", "k_layernorm")
    },
}

WEIGHT_ONLY_LINEARS = ("dt_proj", "classifier")
"""Linears whose owner reads the weight and never calls them (Mamba's, Longcat's router): they stay
whole."""
