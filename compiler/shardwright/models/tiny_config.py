"""Make a tiny version of any configuration: the same structure and switches, with sizes for a CPU.

One table of sizes by attribute name; an attribute outside the table keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from shardwright.models.model_graph import name_pattern

# The layers that a shallow copy keeps: one of every kind, in order. A configuration describes
# layers in lists as long as the model is deep, in lists of layer numbers, and in
# `per_layer_config`.


LAYERS = 4
MOST_KINDS = 12
"""Largest number of kinds: some lists have a different value for each layer."""

DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_blocks",
    "num_decoder_layers",
)
# Keys that place a kind of layer periodically, where no list does.
_PERIODS = (
    "attn_layer_period",
    "expert_layer_period",
    "layer_group_size",
    "n_layers_per_attn_res_block",
    "global_attn_every_n_layers",
    "interleave_moe_layer_step",
    "rescale_every",
    "decoder_sparse_step",
    "moe_layer_interval",
)
# Numbers of layers counted from one end of the stack.
_COUNTS = (
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "num_kv_shared_layers",
)
_PER_LAYER = "per_layer_config"


def representative_layers(document: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the original layers in the copy, repeated where there are fewer kinds
    than LAYERS."""
    layers = next((document[n] for n in DEPTHS if isinstance(document.get(n), int)), 0)
    first_of_kind: dict[str, int] = {}
    for layer in range(layers):
        values: list[Any] = []
        for name, value in document.items():
            if _is_list_of_layers(name, value, layers):
                values.append(value[layer])
            elif _is_list_of_numbers(name, value, layers):
                values.append(layer in value)
            elif name == _PER_LAYER and isinstance(value, dict):
                values.append([sizes for number, sizes in value.items() if int(number) == layer])
        first_of_kind.setdefault(repr(values), layer)
    kinds = list(first_of_kind.values())[:MOST_KINDS] or [0]
    periods = [
        document[n] + 1
        for n in _PERIODS
        if isinstance(document.get(n), int) and document[n] < MOST_KINDS
    ]
    depth = max(LAYERS, len(kinds), *periods)
    return tuple(kinds[i % len(kinds)] for i in range(depth))


def truncate_layers(document: Mapping[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    """Return the attributes about layers, for the kept layers only."""
    layers = next((document[n] for n in DEPTHS if isinstance(document.get(n), int)), 0)
    out: dict[str, Any] = {}
    for name, value in document.items():
        if name in DEPTHS and isinstance(value, int):
            out[name] = len(kept)
        elif name in _COUNTS and isinstance(value, int):
            out[name] = min(value, 1)
        elif _is_list_of_layers(name, value, layers):
            out[name] = [value[i] for i in kept]
        elif _is_list_of_numbers(name, value, layers):
            out[name] = [place for place, i in enumerate(kept) if i in value]
        elif name == _PER_LAYER and isinstance(value, dict):
            by_number = {int(layer): sizes for layer, sizes in value.items()}
            out[name] = {str(place): by_number[i] for place, i in enumerate(kept) if i in by_number}
    # gpt_neo has two keys for the same.
    if "attention_types" in out.keys() | document.keys() and "attention_layers" in out:
        out["attention_types"] = [[[kind], 1] for kind in out["attention_layers"]]
    return out


def has_every_layer_kind(model: nn.Module, copy: nn.Module) -> bool:
    """Return whether `copy` has each kind of layer of `model`, by module classes and parameter
    names."""
    theirs = _kinds_by_list(copy)
    return all(
        kinds <= theirs.get(path, frozenset()) for path, kinds in _kinds_by_list(model).items()
    )


def _kinds_by_list(model: nn.Module) -> dict[str, frozenset[object]]:
    """Return the kinds of the members of each outermost list of layers."""
    lists = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    outermost = {
        p: m for p, m in lists.items() if not any(p.startswith(f"{other}.") for other in lists)
    }
    return {
        path: frozenset(
            (
                frozenset(type(module) for module in layer.modules()),
                frozenset(name_pattern(name) for name, _ in layer.named_parameters()),
            )
            for layer in layers
        )
        for path, layers in outermost.items()
    }


def _is_list_of_layers(name: str, value: Any, layers: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == layers > 0
        and not _is_list_of_numbers(name, value, layers)
    )


def _is_list_of_numbers(name: str, value: Any, layers: int) -> bool:
    """Return whether the value lists ascending layer numbers (`mlp_only_layers`, `full_attn_idxs`);
    zeros and ones are one value a layer."""
    named = "layer" in name or name.endswith(("_idxs", "_indices"))
    return (
        named
        and isinstance(value, list | tuple)
        and all(type(n) is int and 0 <= n < layers for n in value)
        and list(value) == sorted(set(value))
    )


VOCABULARY = 260

_AT_MOST: dict[str, int] = {
    name: size
    for names, size in (
        (
            "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length",
            64,
        ),
        ("max_target_positions max_source_positions", 64),
        # Rotary embeddings switch their frequencies at this length: the probes' texts are longer,
        # their pieces are not.
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
    ),  # the vision encoder's width, or the decoder's
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
    """Shrink a complete configuration (`PretrainedConfig.to_dict()`), nested ones included.

    depth: False keeps every layer, for what depends on the layer's number.
    widths: False keeps the layers' sizes, for a type whose sizes depend on each other in unknown
        ways.
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
    """Return the value of a key that is the same at any size, None for other keys.

    ids: unused token ids.
    """
    if name in _UNUSED:
        return 0
    if name in _VOCABULARIES and isinstance(value, int):
        # also where the model's own is smaller: the probe needs distinct tokens
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
    """Shrink a size or a count.

    heads: the original number of heads.
    width: the tiny width of the hidden states.
    """
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
    """Shrink lists of sizes, and tables of a layer's sizes or of rotary positions."""
    if name in _AT_MOST and isinstance(value, list) and all(type(n) is int for n in value):
        return [min(n, _AT_MOST[name]) for n in value]
    if name == "per_layer_config" and isinstance(value, dict):
        # A layer without an own value has the common one.
        common = {k: v for k, v in document.items() if k != name}
        small = {layer: shrink({**common, **sizes}, depth=False) for layer, sizes in value.items()}
        return {layer: {k: small[layer][k] for k in sizes} for layer, sizes in value.items()}
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value)
    return value


def _keep_proportions(document: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Set the sizes that follow from others."""
    layers = document.get("per_layer_config") or {}
    parts = {
        sum({**document, **sizes}.get(n) or 0 for n in _KEY_PARTS)
        for sizes in ({}, *layers.values())
    } - {0}
    if isinstance(document.get("kv_lora_rank"), int):
        # Latent attention has one key per head.
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
    out.pop("hybrid_layer_ids", None)  # zamba2 repeats them in layers_block_type
    names = ("num_heads", "head_dim", "expand", "hidden_size")  # of a state-space layer
    if all(isinstance(document.get(name), int) for name in names):
        heads, head, expand, hidden = (document[name] for name in names)
        if heads * head == expand * hidden:
            out["num_heads"] = expand * out["hidden_size"] // out["head_dim"]


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Shrink a rotary table: drop lists of sections, whose lengths are the original head's; cap its
    switch length.

    _fit_ropes shortens the lists of factors.
    """
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
    """Shorten longrope's factors (one per rotated pair) to the tiny head, and lower a dynamic
    table's switch length."""
    heads = next((out[n] for n in _HEADS if isinstance(out.get(n), int)), 1)
    width = next((out[n] for n in _WIDTHS if isinstance(out.get(n), int)), heads)
    head = out.get("head_dim") or (
        out.get("qk_rope_head_dim") if "kv_lora_rank" in document else None
    )
    for name in ("rope_parameters", "rope_scaling"):
        value = out.get(name)
        tables = [value] if isinstance(value, dict) else []
        if nested := [t for table in tables for t in table.values() if isinstance(t, dict)]:
            tables = nested  # one for each kind of layer
        for table in tables:
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


# Shrinking a vision encoder: small images of few patches, and widths that fit the decoder's. It
# keeps its depth.


PATCH, SIDE = 4, 4
"""Pixels of a patch's side, patches of an image's side."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_IMAGE_SIZES = ("image_size", "image_resolution", "crop_size")
_DEPTHS = ("depth", "num_hidden_layers", "num_layers", "n_layers")
_TO_TEXT = ("out_hidden_size", "projection_dim", "output_dim", "text_hidden_size")
_ENCODER_HEADS = ("encoder_attention_heads", "num_encoder_attention_heads")
_TOKENS = ("mm_tokens_per_image", "image_seq_length", "num_image_tokens")


def tiny_vision_encoder(
    document: Mapping[str, Any], real: Mapping[str, Any], text_width: int | None = None
) -> dict[str, Any]:
    """Shrink the vision encoders of a configuration that shrink() has made tiny.

    document: the tiny configuration.
    real: the original one.
    text_width: the decoder's width, for a sub-configuration.
    """
    text: Mapping[str, Any] = next(
        (document[name] for name in _TEXT if isinstance(document.get(name), dict)), document
    )
    width = text.get("hidden_size") if text_width is None else text_width
    out: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict) and isinstance(value.get("patch_size"), int):
            out[name] = _shrink_encoder(value, real[name], width)
        elif value is text and isinstance(value, dict):
            out[name] = {**value, **_sections(value, real[name])}
        elif isinstance(value, dict) and "model_type" in value:
            out[name] = tiny_vision_encoder(value, real[name], width)
        elif name in _TO_TEXT and isinstance(value, int) and width is not None:
            out[name] = width
        elif name in _ENCODER_HEADS and isinstance(value, int):
            out[name] = min(value, 4)
        elif name in _TOKENS and isinstance(value, int):
            out[name] = SIDE if name == "mm_tokens_per_image" else SIDE * SIDE
        else:
            out[name] = value
    return {**out, **_encoder_sizes(out, real)}


def equalize_encoder_widths(document: Mapping[str, Any]) -> dict[str, Any]:
    """Make a contrastive model's text features as wide as its image features.

    document: a configuration from tiny_vision_encoder.
    """
    sides = {
        name: value for name, value in document.items() if name in _TEXT and isinstance(value, dict)
    }
    encoder = next((v for v in document.values() if isinstance(v, dict) and "patch_size" in v), {})
    return {
        **document,
        **{
            name: {**side, "projection_size": encoder["hidden_size"]}
            for name, side in sides.items()
            if "projection_size" in side
        },
    }


def _encoder_sizes(document: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys about the vision encoder that stand beside its own configuration."""
    parts = (name for name, v in document.items() if isinstance(v, dict) and "patch_size" in v)
    name = next(parts, None)
    if name is None:
        return {}
    encoder, real_encoder, out = document[name], real[name], {}
    wide, real_wide = encoder.get("hidden_size"), real_encoder.get("hidden_size")
    for key, value in real.items():
        if isinstance(value, int) and key.endswith("hidden_size") and wide and real_wide:
            if value == real_wide:
                out[key] = wide
            elif value == real_wide * (encoder.get("merge_size") or 0) ** 2:  # one token's patches
                out[key] = wide * encoder["merge_size"] ** 2
        elif key == "image_grid_pinpoints" and isinstance(value, list):
            tile = real_encoder["image_size"]
            out[key] = [[PATCH * SIDE * side // tile for side in pair] for pair in value]
    return out


def _sections(text: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary sections (time, height, width) that fill half a tiny head; shrink() drops the
    original ones."""
    for name in ("rope_parameters", "rope_scaling"):
        table, small = real.get(name), text.get(name)
        if (
            isinstance(table, dict)
            and isinstance(small, dict)
            and isinstance(table.get("mrope_section"), list)
        ):
            head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
            rotated = (text.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
            sizes, half = table["mrope_section"], int(head * rotated) // 2
            parts = [max(1, half * size // sum(sizes)) for size in sizes[:-1]]
            return {name: {**small, "mrope_section": [*parts, half - sum(parts)]}}
    return {}


def _shrink_encoder(
    document: Mapping[str, Any], real: Mapping[str, Any], text_width: int | None
) -> dict[str, Any]:
    merge = document.get("spatial_merge_size") or 1
    out = dict(document)
    for name, value in document.items():
        if name in _IMAGE_SIZES and isinstance(value, int):
            out[name] = PATCH * SIDE
        elif name in _IMAGE_SIZES and isinstance(value, list):
            out[name] = [PATCH * SIDE] * len(value)
        elif name in _DEPTHS or (isinstance(value, list) and "layer" in name):
            out[name] = real[name]  # block numbers say where features are taken
        elif name in _TO_TEXT and isinstance(value, int) and text_width is not None:
            out[name] = text_width
    width, inner = real.get("hidden_size"), real.get("intermediate_size")
    if width and inner and not inner % width:  # a multiple of the width stays one
        out["intermediate_size"] = inner // width * out["hidden_size"]
    if isinstance(document.get("patch_size"), int):
        out["patch_size"] = PATCH
    if isinstance(document.get("window_size"), int):
        out["window_size"] = PATCH * merge * 2
    if isinstance(document.get("num_position_embeddings"), int):
        out["num_position_embeddings"] = SIDE * SIDE
    return out


# Token ids of a configuration: plain text, special tokens, placeholders.


_IN_TEXT = ("pad", "bos", "eos", "unk", "sep", "cls", "mask")
"""Prefixes of the names of special ids that a text may hold."""
_ENDINGS = ("_token_id", "_token_index", "_patch_id", "_token_ids", "_start_id", "_end_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Classify a configuration's ids; placeholders of images, audio and the like are in neither.

    plain: ids without a special meaning, ascending.
    special: ids with a special meaning in a text, the first id and the last one.
    """

    plain: tuple[int, ...]
    special: tuple[int, ...]


def token_ids(config: PretrainedConfig) -> TokenIds:
    """Read the ids of `config` and its sub-configurations, by name."""
    text = config.get_text_config(decoder=True)
    size = int(
        getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or VOCABULARY
    )
    named = [(name, number) for name, number in _named(config.to_dict()) if 0 <= number < size]
    others = {number for name, number in named if not name.startswith(_IN_TEXT)}
    inside = {number for name, number in named if name.startswith(_IN_TEXT)}
    special = sorted(({0, size - 1} | inside) - others)
    plain = tuple(number for number in range(size) if number not in others and number not in inside)
    return TokenIds(plain=plain[1:-1], special=tuple(special))


def _named(document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (name, id) of each key that names token ids, one or a list."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif isinstance(name, str) and (
            name.endswith(_ENDINGS) or name in ("image_token", "video_token", "audio_token")
        ):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield name, number
