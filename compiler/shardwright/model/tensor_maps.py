"""Tensor-parallel maps of our own, for families that transformers ships no plan for, and what its plans leave out.

Paths are relative to the base model, * is any number. `tests/zoo` proves them like every other.
"""

from __future__ import annotations

from collections.abc import Mapping

OWN_MAPS: dict[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn": "local_heads",
        "h.*.attn.c_attn": "fused_qkv_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "opt": {
        "decoder.layers.*.self_attn": "local_heads",
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    # Fused q, k, v one behind the other within each head, so that heads are cut plainly. ALiBi comes per head.
    "bloom": {
        "h.*.self_attention": "local_heads",
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    # Fused per key/value head; with one such head (7b) `multi_query_colwise` is put in its place.
    "falcon": {
        "h.*.self_attention": "local_heads",
        "h.*.self_attention.query_key_value": "grouped_qkv_colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    "gpt_bigcode": {
        "h.*.attn": "local_heads",
        "h.*.attn.c_attn": "grouped_qkv_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "stablelm": {
        "layers.*.self_attn": "local_heads",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    "gptj": {
        "h.*.attn": "local_heads",
        "h.*.attn.q_proj": "colwise",
        "h.*.attn.k_proj": "colwise",
        "h.*.attn.v_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    },
    "gpt_neo": {
        "h.*.attn.attention": "local_heads",
        "h.*.attn.attention.q_proj": "colwise",
        "h.*.attn.attention.k_proj": "colwise",
        "h.*.attn.attention.v_proj": "colwise",
        "h.*.attn.attention.out_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "mpt": {
        "blocks.*.attn": "local_heads",
        "blocks.*.attn.Wqkv": "fused_qkv_colwise",
        "blocks.*.attn.out_proj": "rowwise",
        "blocks.*.ffn.up_proj": "colwise",
        "blocks.*.ffn.down_proj": "rowwise",
    },
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
OWN_MAPS["gpt-sw3"] = OWN_MAPS["gpt2"]

_LATENT_ATTENTION: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""As transformers' plan of DeepSeek-V2; its plans of later models leave the attention out."""

PLAN_ADDITIONS: dict[str, Mapping[str, str]] = {
    # Learned numbers of the activation, which each rank applies to its own features.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "axk1": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "youtu": _LATENT_ATTENTION,
    # A norm with a row for every head.
    "cohere": {"layers.*.self_attn.q_norm.weight": "colwise", "layers.*.self_attn.k_norm.weight": "colwise"},
    # Norms that each rank applies to its own heads.
    "glm4_moe": {
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    },
    "phi": {
        "layers.*.self_attn.q_layernorm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_layernorm": "replicated_with_grad_allreduce",
    },
}

READ_BY_WEIGHT = ("dt_proj", "classifier")
"""Linears whose owner reads the weight and never calls them (Mamba's, Longcat's router): they stay whole."""
