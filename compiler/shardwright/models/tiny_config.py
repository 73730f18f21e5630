"""A configuration of any type, made tiny: the same structure and switches, sizes that a CPU runs in
a blink.

One table of sizes by attribute name; what it does not name stays as it is. models/layer_kinds.py
says which layers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.models.layer_kinds import representative_layers, truncate_layers

VOCABULARY = 260

_AT_MOST: dict[str, int] = {
    name: size
    for names, size in (
        (
            "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length",
            64,
        ),
        ("max_target_positions max_source_positions", 64),
        # Rotary embeddings switch their frequencies here: texts of the probes are longer, pieces of
        # them are not.
        ("original_max_position_embeddings", 16),
        ("embedding_size input_embedding_size", 48),
        ("output_embedding_size", 80),
        ("num_attention_heads n_head n_heads num_heads attention_heads", 4),
        ("decoder_attention_heads swa_num_attention_heads", 4),
        ("head_dim d_head dim_head swa_head_dim kv_channels attention_head_size v_head_dim", 16),
        ("rotary_dim qk_rope_head_dim", 8),
        ("q_lora_rank", 20),
        ("kv_lora_rank", 24),
        ("qk_nope_head_dim o_lora_rank", 12),
        ("o_groups", 2),
        ("index_topk", 8),
        ("index_head_dim", 16),
        ("index_n_heads", 4),
        (
            (
                "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim n_inner dff dim_ff "
                "d_inner feed_forward_size"
            ),
            112,
        ),
        ("intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size", 112),
        ("moe_intermediate_size expert_ffn_hidden_size", 96),
        (
            (
                "shared_expert_intermediate_size shared_experts_intermediate_size "
                "shared_intermediate_size"
            ),
            104,
        ),
        ("moe_shared_expert_intermediate_size", 104),
        ("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts", 2),
        ("n_shared_experts num_shared_experts moe_num_shared_experts", 1),
        ("n_group num_expert_group", 2),
        ("topk_group", 1),
        ("zero_expert_num", 2),
        ("encoder_hash_byte_group_vocab", 50),
        (
            (
                "sliding_window window_size attention_window_size sliding_window_size "
                "attention_chunk_size"
            ),
            8,
        ),
        ("state_size ssm_state_size mamba_d_state", 8),
        (
            (
                "conv_kernel mamba_d_conv conv1d_width linear_conv_kernel_dim "
                "short_conv_kernel_size conv_L_cache"
            ),
            3,
        ),
        ("conv_kernel_size ple_conv_kernel_size", 3),
        ("chunk_size mamba_chunk_size", 8),
        ("mamba_n_heads mamba_num_heads", 8),
        ("mamba_d_head mamba_head_dim mamba_headdim", 16),
        ("mamba_n_groups n_groups mamba_ngroups", 2),
        ("time_step_rank mamba_dt_rank", 6),
        ("linear_key_head_dim linear_value_head_dim linear_head_dim", 16),
        ("linear_num_key_heads linear_num_heads", 2),
        ("linear_num_value_heads", 4),
    )
    for name in names.split()
}
_WIDTHS = (
    *(
        "hidden_size",
        "d_model",
        "n_embd",
        "emb_dim",
        "embedding_dim",
        "lru_width",
        "hidden_size_global",
    ),
    *(
        "adapter_in_dim",
        "adapter_out_dim",
        "adapter_input_size",
    ),  # a tower's own width, or the decoder's
)
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim")
_UNUSED = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
)  # multi-token prediction: training code does not use it


def shrink(
    document: Mapping[str, Any], *, depth: bool = True, widths: bool = True
) -> dict[str, Any]:
    """`document`: a complete configuration (`PretrainedConfig.to_dict()`), nested ones included.

    depth False keeps every layer, for what depends on which layer it is; widths False keeps the
    layers' own sizes, for a type whose sizes hang together in a way that the table does not know.
    """
    heads = next((document[n] for n in _HEADS if isinstance(document.get(n), int)), 4)
    width = 64 if 64 % min(heads, 4) == 0 else 16 * heads
    if depth:
        document = {**document, **truncate_layers(document, representative_layers(document))}
    ids = iter(range(3, VOCABULARY))
    out: dict[str, Any] = {}
    for name, value in document.items():
        fixed = _fixed(name, value, ids)
        if fixed is not None:
            out[name] = fixed
        elif isinstance(value, dict) and "model_type" in value:
            out[name] = shrink(value, depth=depth, widths=widths)
        elif not widths:
            out[name] = value
        elif isinstance(value, int):
            out[name] = _number(document, name, value, heads, width)
        else:
            out[name] = _inside(document, name, value)
    if widths:
        _keep_proportions(document, out)
        _fit_ropes(document, out)
    return out


def _fixed(name: str, value: Any, ids: Iterator[int]) -> int | float | None:
    """What is the same whatever the sizes; None for the rest. ids: of tokens that nothing has
    yet."""
    if name in _UNUSED:
        return 0
    if name in _VOCABULARIES and isinstance(value, int):
        # also where the model's own is smaller: the probe needs tokens to tell apart
        return VOCABULARY
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0  # the probe runs in training mode, and compares bits
    if (
        name.endswith(("_token_id", "_token_index", "_patch_id"))
        and isinstance(value, int)
        and value >= VOCABULARY
    ):
        return next(ids)
    return None


def _number(document: Mapping[str, Any], name: str, value: int, heads: int, width: int) -> int:
    """A size or a count, made small. heads: the real number; width: of the hidden states, small."""
    if name in _KEY_VALUE_HEADS:
        return (
            min(heads, 4) if value == heads else (2 if value > 1 and min(heads, 4) % 2 == 0 else 1)
        )
    if name in _WIDTHS:
        return min(value, width)
    if name == "word_embed_proj_dim":
        return min(value, width) if value == document.get("hidden_size") else 48
    if name in _AT_MOST and not isinstance(value, bool):
        return min(value, _AT_MOST[name])
    if name == "attention_hidden_size":
        return width * max(1, value // int(document.get("hidden_size", value)))
    return value


def _inside(document: Mapping[str, Any], name: str, value: Any) -> Any:
    """Lists of sizes, and tables that say a layer's sizes or the rotary positions."""
    if name in _AT_MOST and isinstance(value, list) and all(type(n) is int for n in value):
        return [min(n, _AT_MOST[name]) for n in value]
    if name == "per_layer_config" and isinstance(value, dict):
        whole = {
            k: v for k, v in document.items() if k != name
        }  # what a layer does not say is as everywhere
        small = {layer: shrink({**whole, **sizes}, depth=False) for layer, sizes in value.items()}
        return {layer: {k: small[layer][k] for k in sizes} for layer, sizes in value.items()}
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value)
    return value


def _keep_proportions(document: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Sizes that follow from others."""
    layers = document.get("per_layer_config") or {}
    parts = {
        sum({**document, **sizes}.get(n) or 0 for n in _KEY_PARTS)
        for sizes in ({}, *layers.values())
    } - {0}
    if isinstance(document.get("kv_lora_rank"), int):
        # Latent attention makes every head its own key.
        out["num_key_value_heads"] = out.get("num_attention_heads")
        if document.get("head_dim") not in (document.get("qk_rope_head_dim"), *parts):
            out.pop("head_dim", None)  # it follows from the others
    for whole in ("head_dim", "qk_head_dim"):
        if out.get(whole) is not None and document[whole] in parts:
            out[whole] = sum(out[n] for n in _KEY_PARTS)
        elif (
            out.get(whole) is not None and parts and document[whole] == document["qk_rope_head_dim"]
        ):
            out[whole] = out["qk_rope_head_dim"]
    if "attention_head_dim" in out and "attention_hidden_size" in out:
        out["attention_head_dim"] = out["attention_hidden_size"] // out["num_attention_heads"]
    if (
        document.get("mamba_d_ssm")
        and document["mamba_d_ssm"] == document["mamba_n_heads"] * document["mamba_d_head"]
    ):
        out["mamba_d_ssm"] = out["mamba_n_heads"] * out["mamba_d_head"]
    out.pop("hybrid_layer_ids", None)  # zamba2 says it again in layers_block_type
    names = ("num_heads", "head_dim", "expand", "hidden_size")  # of a state-space layer
    if all(isinstance(document.get(name), int) for name in names):
        heads, head, expand, hidden = (document[name] for name in names)
        if heads * head == expand * hidden:
            out["num_heads"] = expand * out["hidden_size"] // out["head_dim"]


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """The same kind of table. Lists of sections are as long as the real head: without them the
    table keeps its place in the model; those of factors are cut to the small one (_fit_ropes)."""
    if any(isinstance(v, dict) for v in value.values()):
        return {
            kind: _rope(table) if isinstance(table, dict) else table
            for kind, table in value.items()
        }
    out = {
        name: number
        for name, number in value.items()
        if not isinstance(number, list) or name in _FACTORS
    }
    if isinstance(out.get(_SWITCH), int):
        out[_SWITCH] = min(out[_SWITCH], _AT_MOST[_SWITCH])
    return out


_FACTORS = ("short_factor", "long_factor")
_SWITCH = "original_max_position_embeddings"


def _fit_ropes(document: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Cut longrope's factors, one for each rotated pair of a head, to the small head; a dynamic
    table switches at the longest position, which comes down to where the probes reach."""
    heads = next((out[n] for n in _HEADS if isinstance(out.get(n), int)), 1)
    width = next((out[n] for n in _WIDTHS if isinstance(out.get(n), int)), heads)
    head = out.get("head_dim") or (
        out.get("qk_rope_head_dim") if "kv_lora_rank" in document else None
    )
    for name in ("rope_parameters", "rope_scaling"):
        for table in _tables(out.get(name)):
            share = table.get("partial_rotary_factor", out.get("partial_rotary_factor")) or 1.0
            pairs = int((head or width // heads) * share) // 2
            for factors in _FACTORS:
                if isinstance(table.get(factors), list):
                    table[factors] = table[factors][:: max(1, len(table[factors]) // pairs)][:pairs]
            kind = str(table.get("rope_type", table.get("type", "")))
            if "dynamic" in kind and isinstance(out.get("max_position_embeddings"), int):
                out["max_position_embeddings"] = min(
                    out["max_position_embeddings"], _AT_MOST[_SWITCH]
                )


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    """One rotary table, or one for each kind of layer."""
    if isinstance(value, dict):
        nested = [table for table in value.values() if isinstance(table, dict)]
        yield from nested or [value]
