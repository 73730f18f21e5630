"""A configuration of any type, made tiny: the same structure and switches, sizes that a CPU runs in a blink.

One table by attribute name; what it does not name stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 4
VOCABULARY = 260

_AT_MOST: dict[str, int] = {
    name: size
    for names, size in (
        (("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
        (("model_max_length", "max_target_positions", "max_source_positions"), 64),
        (("embedding_size", "input_embedding_size"), 48),
        (("output_embedding_size",), 80),
        (("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
        (("decoder_attention_heads", "swa_num_attention_heads"), 4),
        (("head_dim", "d_head", "dim_head", "swa_head_dim", "kv_channels", "attention_head_size", "v_head_dim"), 16),
        (("rotary_dim", "qk_rope_head_dim"), 8),
        (("q_lora_rank",), 20),
        (("kv_lora_rank",), 24),
        (("qk_nope_head_dim", "o_lora_rank"), 12),
        (("o_groups",), 2),
        (("index_topk",), 8),
        (("index_head_dim",), 16),
        (("index_n_heads",), 4),
        (("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "n_inner", "dff", "dim_ff"), 112),
        (("d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size"), 112),
        (("prefix_dense_intermediate_size",), 112),
        (("moe_intermediate_size", "expert_ffn_hidden_size"), 96),
        (("shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size"), 104),
        (("moe_shared_expert_intermediate_size",), 104),
        (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        (("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
        (("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
        (("n_group", "num_expert_group"), 2),
        (("topk_group",), 1),
        (("zero_expert_num",), 2),
        (("first_k_dense_replace", "num_dense_layers"), 1),
        (("sliding_window", "window_size", "attention_window_size", "sliding_window_size", "attention_chunk_size"), 8),
        (("state_size", "ssm_state_size", "mamba_d_state"), 8),
        (("conv_kernel", "mamba_d_conv", "conv1d_width", "linear_conv_kernel_dim", "short_conv_kernel_size"), 3),
        (("conv_L_cache", "conv_kernel_size", "ple_conv_kernel_size"), 3),
        (("chunk_size", "mamba_chunk_size"), 8),
        (("mamba_n_heads", "mamba_num_heads"), 8),
        (("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
        (("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
        (("time_step_rank", "mamba_dt_rank"), 6),
        (("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
        (("linear_num_key_heads", "linear_num_heads"), 2),
        (("linear_num_value_heads",), 4),
    )
    for name in names
}
_WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "lru_width", "attention_hidden_size")
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_blocks",
    "num_decoder_layers",
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_UNUSED = ("num_nextn_predict_layers", "num_mtp_layers")  # multi-token prediction: training code does not use it


def shrink(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document`: a complete configuration (`PretrainedConfig.to_dict()`), nested ones included."""
    heads = next((document[n] for n in _HEADS if isinstance(document.get(n), int)), 4)
    width = 64 if 64 % min(heads, 4) == 0 else 16 * heads
    kinds = [len(set(v)) for n, v in document.items() if _is_mixture(n) and isinstance(v, list)]
    depth = max(LAYERS, *kinds) if kinds else LAYERS
    ids = iter(range(3, VOCABULARY))
    out: dict[str, Any] = {}
    for name, value in document.items():
        if name in _UNUSED:
            out[name] = 0
        elif name in _DEPTHS and isinstance(value, int):
            out[name] = depth
        elif name in _VOCABULARIES and isinstance(value, int):
            out[name] = VOCABULARY  # also where the model's own is smaller: the probe needs tokens to tell apart
        elif name in _KEY_VALUE_HEADS and isinstance(value, int):
            out[name] = min(heads, 4) if value == heads else (2 if value > 1 and min(heads, 4) % 2 == 0 else 1)
        elif name in _WIDTHS and isinstance(value, int):
            out[name] = min(value, width)
        elif name == "word_embed_proj_dim" and isinstance(value, int):
            out[name] = min(value, width) if value == document.get("hidden_size") else 48
        elif name in _AT_MOST and isinstance(value, int) and not isinstance(value, bool):
            out[name] = min(value, _AT_MOST[name])
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            out[name] = next(ids)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            out[name] = _rope(value)
        elif _is_mixture(name):
            out[name] = _mixture(value, depth)
        elif isinstance(value, dict) and "model_type" in value:
            out[name] = shrink(value)
        else:
            out[name] = value
    if isinstance(document.get("kv_lora_rank"), int):
        # Latent attention makes every head its own key; head_dim follows from the rope part.
        out["num_key_value_heads"] = out.get("num_attention_heads")
        out.pop("head_dim", None)
    return out


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Lists of factors are as long as the real head: the plain table has the same place in the model."""
    if value and all(isinstance(v, dict) for v in value.values()):
        return {kind: _rope(table) for kind, table in value.items()}
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{k: value[k] for k in kept if k in value}}


def _is_mixture(name: str) -> bool:
    return name == "layers_block_type" or name.endswith("layer_types")


def _mixture(value: Any, depth: int) -> Any:
    """Every kind of layer that the model has, in its order of appearance, repeated up to `depth`."""
    if not isinstance(value, list) or not value:
        return value
    kinds = list(dict.fromkeys(value))
    return [kinds[i % len(kinds)] for i in range(depth)]
