"""A tiny configuration for every causal-LM type of the installed transformers.

One shrinker reads the defaults of a type's own config class and sets what it finds by attribute
name: small sizes (SIZES), bounded mixtures of layer kinds, and values that differ from the defaults
(FLAGS, SCALES), so that a wrong multiplier, bias or window shows in a comparison. What a type needs
beside that is in OVERRIDES.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.overrides import IMPOSSIBLE, OVERRIDES, VARIANTS, Json

TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
RUNNABLE: tuple[str, ...] = tuple(t for t in TYPES if t not in IMPOSSIBLE)

VOCABULARY = 260
TEXT_VOCABULARY = 250
"""Ids from here up are image, audio and video placeholders of the multimodal types: text uses only
the ids below."""

LAYERS = 4

SIZES: dict[str, Json] = {
    # vocabulary and positions
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "type_vocab_size": 2,
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "context_length",
            "model_max_length",
        ),
        64,
    ),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 64),
    "original_max_position_embeddings": 32,
    # width
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "lru_width"), 64
    ),
    **dict.fromkeys(("embedding_size", "input_embedding_size"), 48),  # a projection follows
    **dict.fromkeys(("attention_hidden_size", "word_embed_proj_dim"), 64),
    "output_embedding_size": 80,
    # depth
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_blocks",
        ),
        LAYERS,
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    # heads
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(
        ("num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "d_head", "dim_head", "swa_head_dim", "kv_channels", "attention_head_size"), 16
    ),
    "rotary_dim": 8,
    # multi-head latent attention and sparse indexers
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "o_lora_rank": 12,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "index_topk": 8,  # of 24 keys
    "index_head_dim": 16,
    "index_n_heads": 4,
    # feed-forward
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"),
        112,
    ),
    **dict.fromkeys(
        ("n_inner", "dff", "dim_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp"), 112
    ),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 112),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 104),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 104),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "zero_expert_num": 2,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    # windows, far below the 24 tokens of a test
    **dict.fromkeys(
        ("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), 8
    ),
    "attention_chunk_size": 8,
    # image towers: built, never run
    "image_size": 28,
    "patch_size": 14,
    # state space, convolutions, linear attention
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "conv1d_width", "linear_conv_kernel_dim"), 3),
    **dict.fromkeys(
        ("short_conv_kernel_size", "conv_L_cache", "conv_kernel_size", "ple_conv_kernel_size"), 3
    ),
    **dict.fromkeys(("expand", "mamba_expand"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 6),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    "linear_num_value_heads": 4,
    # weights wide enough for attention scores and soft caps to matter
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.1),
    "unpadded_vocab_size": VOCABULARY,
    # no multi-token prediction: training code does not use it
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0),
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

# Switches that add parameters or code paths.
FLAGS: dict[str, Json] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "lm_head_bias"), True
    ),
    **dict.fromkeys(
        ("attention_out_bias", "decoder_bias", "norm_bias", "bias", "add_bias_linear", "conv_bias"),
        True,
    ),
    **dict.fromkeys(
        ("projectors_bias", "mamba_proj_bias", "mamba_conv_bias", "use_conv_bias"), True
    ),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "norm_topk_prob", "scale_embedding"), True),
    **dict.fromkeys(("use_sliding_window", "is_decoder", "causal"), True),
    **dict.fromkeys(
        ("is_encoder_decoder", "add_cross_attention", "is_encoder", "output_router_logits"), False
    ),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"), 5.0),
    **dict.fromkeys(("output_logit_soft_cap", "gate_soft_cap"), 5.0),
    "clip_qkv": 0.5,
    "query_pre_attn_scalar": 24,  # not head_dim
    "max_window_layers": 2,
}

# Multipliers: the seed moves each by up to 10 % around a value that is not the default.
SCALES: dict[str, float] = {
    "embedding_multiplier": 1.6,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.4,
    "logit_scale": 0.6,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "routed_scaling_factor": 1.7,
    "router_scaling_factor": 1.7,
    "moe_routed_scaling_factor": 1.7,
    "route_scale": 1.7,
    "scale_emb": 2.5,
    "scale_depth": 1.9,
    "embedding_scale": 3.0,
    "attention_value_scale": 0.6,
    "logits_mup_width_multiplier": 3.0,
    "attn_scale": 0.2,
}


CODEBOOK_TYPES = ("musicgen", "musicgen_melody")
"""Labels are (batch, sequence, codebooks), one codebook here."""


@cache
def defaults(model_type: str) -> dict[str, Json]:
    """The default values of a type's own config class, by attribute name."""
    document: dict[str, Json] = CONFIG_MAPPING[model_type]().to_dict()
    return document


def tiny_config(model_type: str, seed: int = 0) -> dict[str, Json]:
    """A plain JSON document with "model_type" for AutoConfig.for_model(**document). Only what
    differs is in it.

    The seed moves the multipliers only, never a shape. Raises KeyError for a type in IMPOSSIBLE or
    an unknown one.
    """
    if model_type in VARIANTS:
        return {**tiny_config(base_type(model_type), seed), **VARIANTS[model_type]}
    if model_type in IMPOSSIBLE or model_type not in TYPES:
        raise KeyError(f"{model_type}: {IMPOSSIBLE.get(model_type, 'not a causal-LM type')}")
    # A copy: configuration classes write into the nested dictionaries that they are given.
    return copy.deepcopy(
        _shrink(model_type, defaults(model_type), random.Random(f"{model_type} {seed}"))
    )


def base_type(name: str) -> str:
    """The model type of a type or of a variant."""
    return name.partition("/")[0]


def _shrink(model_type: str, default: dict[str, Json], draw: random.Random) -> dict[str, Json]:
    out: dict[str, Json] = {"model_type": model_type} if model_type else {}
    placeholders = iter(range(TEXT_VOCABULARY, VOCABULARY))
    for name, value in default.items():
        if name in SIZES:
            out[name] = SIZES[name]
        elif name in FLAGS:
            out[name] = FLAGS[name]
        elif name in SCALES:
            out[name] = round(SCALES[name] * draw.uniform(0.9, 1.1), 3)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            out[name] = 0.0
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            out[name] = (
                None
                if value is None
                else ("pad_token_id", "bos_token_id", "eos_token_id").index(name)
            )
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            out[name] = next(placeholders)
        elif name == "rope_parameters" and isinstance(value, dict) and value:
            out[name] = _rope(value)
        elif name in ("layer_types", "layers_block_type", "indexer_types"):
            out[name] = _mixture(value)
        elif name == "mlp_layer_types":
            out[name] = _first_then_rest(value)
        elif isinstance(value, dict) and "model_type" in value:
            out[name] = _shrink(str(value["model_type"]), value, draw)
    if "kv_lora_rank" in default:
        # Latent attention makes every head its own key, and head_dim is the rotary part.
        out["num_key_value_heads"] = out["num_attention_heads"]
        out["head_dim"] = out["qk_rope_head_dim"]
    return _merge(out, OVERRIDES.get(model_type, {}))


def _merge(base: dict[str, Json], extra: dict[str, Json]) -> dict[str, Json]:
    """`extra` over `base`; nested configurations merge, everything else is replaced, `...` is
    removed."""
    out = dict(base)
    for name, value in extra.items():
        nested = (
            name.endswith("_config")
            and isinstance(value, dict)
            and name in base
            and name != "per_layer_config"
        )
        out[name] = _merge(base[name], value) if nested else value
    return {name: value for name, value in out.items() if value is not ...}


def _rope(value: dict[str, Json]) -> dict[str, Json]:
    """The type's own kind of rotary table, with another base, half of the head where partial, and a
    short history."""
    if "rope_type" not in value:  # one table per layer kind, each with a base of its own
        return {
            kind: {**_rope(table), "rope_theta": 5000.0 + 2000.0 * index}
            if isinstance(table, dict)
            else table
            for index, (kind, table) in enumerate(value.items())
        }
    out = {**value, "rope_theta": 5000.0}
    if "partial_rotary_factor" in value:
        out["partial_rotary_factor"] = 0.5
    if "original_max_position_embeddings" in value:
        out["original_max_position_embeddings"] = 16
    return out


def _mixture(value: Json) -> Json:
    """Every kind of layer that the default has, in its order, repeated up to LAYERS."""
    if not isinstance(value, list) or not value:
        return value
    kinds = list(dict.fromkeys(value))
    return [kinds[i % len(kinds)] for i in range(max(LAYERS, len(kinds)))]


def _first_then_rest(value: Json) -> Json:
    """Each kind once in the order of the default, the last one up to LAYERS: one dense layer, then
    experts."""
    if not isinstance(value, list) or not value:
        return value
    kinds = list(dict.fromkeys(value))
    return kinds + kinds[-1:] * (LAYERS - len(kinds))


def build(model_type: str, seed: int = 0) -> Any:
    """The tiny model of a type on the CPU in fp32, train mode, weights drawn from the seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**tiny_config(model_type, seed))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.train()
    return model


def inputs(model_type: str, ids: torch.Tensor) -> dict[str, Json]:
    """Keyword arguments of a training step on token ids of shape (batch, sequence): labels as the
    type wants them."""
    batch: dict[str, Json] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if model_type in CODEBOOK_TYPES:
        batch["labels"] = ids[..., None]
    elif model_type == "git":
        # The loss skips as many logits as an image has tokens (one here) even where no image is
        # given.
        batch["shift_labels"] = torch.nn.functional.pad(ids[:, 2:], (0, 1), value=-100)
    return batch


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Adds normal(0, 0.05) to every parameter once, so that no bias is all zero and no norm weight
    all one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.05, generator=generator))
