"""What a type needs beside the generic shrinker of configs.py: each entry says why.

A nested configuration takes the entry of its own type first, then what the outer entry says of it.
`...` removes a key.
"""

from __future__ import annotations

from typing import Any

Json = Any

IMPOSSIBLE: dict[str, str] = {
    "gemma3n": (
        "its vision tower is a timm model: timm and PIL are not dependencies; the text part is "
        "gemma3n_text"
    ),
    "gemma4_assistant": "a drafter: every layer reads the keys and values of a target model",
    "gemma4_unified_assistant": (
        "a drafter: every layer reads the keys and values of a target model"
    ),
}

SLIDING_FIRST = ["sliding_attention", "full_attention"] * 2
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]

# For types that read the factor but do not name it in their defaults.
HALF_ROTARY = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}

# A layer that shares sits behind the middle, so that what it reads crosses a two-stage pipeline.
INDEXER_SHARED = ["full", "shared", "shared", "full"]

# Sliding layers of these have sizes of their own: here more positions in a head, fewer heads.
DOTS_SLIDING = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 18,
    "kv_lora_rank": 28,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# The class takes the decoder's configuration, the mapping hands it the composite one: the decoder's
# names go on top.
MUSICGEN = {
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "ffn_dim": 112,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "activation_function": "gelu",
    "layerdrop": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "initializer_factor": 0.1,
    "scale_embedding": True,
    "num_codebooks": 1,  # input_ids are (batch * codebooks, sequence)
    "audio_channels": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "is_decoder": True,
    "add_cross_attention": False,
}

OVERRIDES: dict[str, dict[str, Json]] = {
    "afmoe": {
        "mup_enabled": True,
        "global_attn_every_n_layers": 2,
    },  # the embedding multiplier hangs on it
    "axk2": {"gated_norm_rank": 8},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},  # no attention layer by default
    # Short sequences leave block-sparse attention at run time anyway, by editing the configuration.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bloom": {"apply_residual_connection_post_layernorm": True},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "local_attention_window_len": 8,
    },  # half a million rows otherwise
    "blt_local_encoder": {"hidden_size_global": 64, "num_hidden_layers": 2},
    "blt_local_decoder": {"hidden_size_global": 64},
    "cohere2_moe": {
        "mlp_layer_types": DENSE_FIRST,
        "layer_types": SLIDING_FIRST,
    },  # experts only by default
    # No rotary table by default: it looks one up per layer kind and fails.
    "cohere_compass_text": {
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "mrope_section": [2, 3, 3],
            },
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 7000.0,
                "mrope_section": [2, 3, 3],
            },
        },
    },
    "cpmant": {
        "prompt_length": 4,
        "prompt_types": 4,
        "segment_types": 4,
        "position_bias_num_buckets": 16,
    },
    # The nested configurations have no type, so no rule reaches all of their names; rope_theta has
    # no default.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 5000.0},
        "ffn_config": {"moe_top_k": 2, "ffn_hidden_size": 96},
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    # Compression windows have to end inside 24 tokens, or the compressors get no gradient.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "compress_rope_theta": 7000.0,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
    "doge": {"keep_window_size": 8},
    "dots1": {"layer_types": SLIDING_FIRST},  # full attention only by default
    # Widths of the adapters have to agree with both towers.
    "dots3_note": {
        "vision_config": {
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "mlp_layer_types": ["dense", "dense", "dense", "dense"],
            "mlp_bias": False,
            "per_layer_config": ...,
        },
        "audio_config": {
            "adapter_input_size": 64,
            "adapter_out_dim": 64,
            "downsample_hidden_size": 16,
        },
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 20,
        "index_head_dim": 16,
        "per_layer_config": {"1": DOTS_SLIDING, "3": DOTS_SLIDING},
    },
    "ernie4_5_moe": {"moe_layer_end_index": 3},  # beyond the last layer by default
    "exaone4": {"sliding_window_pattern": 2},
    "falcon": {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2,
    },  # the form with grouped keys
    "falcon_h1": {
        "mamba_d_ssm": 128,  # heads x their width
        "mlp_multipliers": [0.8, 1.2],
        "ssm_multipliers": [0.7, 1.1, 0.8, 1.2, 0.9],
    },
    "flint": {"mlp_only_layers": [0], "layer_types": ["full_attention", "sliding_attention"] * 2},
    # The last layer reads the keys and values of the second one: sharing is on by default.
    "gemma3n_text": {
        "intermediate_size": [112, 112, 112, 112],
        "layer_types": SLIDING_FIRST,
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    # Full layers have wider heads of their own.
    "gemma4_text": {
        "hidden_size_per_layer_input": 16,
        "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
    },
    "gemma4": {
        "text_config": {"enable_moe_block": True}
    },  # the variant with experts, gemma4_text is the one without
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}}},
    "git": {
        "vision_config": {"image_size": 8, "patch_size": 16}
    },  # one image token: the loss skips as many positions
    "glm_moe_dsa": {"indexer_types": INDEXER_SHARED},  # no sharing by default
    "got_ocr2": {"vision_config": {"image_size": 32, "global_attn_indexes": [1, 3], "mlp_dim": 96}},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]]
    },  # has to name as many layers as there are
    "granite_swa": {"layer_rope_theta": [5000.0, 7000.0, 5000.0, 7000.0]},
    "granitemoe_swa": {"layer_rope_theta": [5000.0, 7000.0, 5000.0, 7000.0]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,  # no attention by default
        "position_embedding_type": "rope",
    },
    "hrm_text": {
        "num_layers_per_stack": 2,
        "num_hidden_layers": 16,
    },  # stack x H_cycles x (L_cycles + 1)
    "hy_v4": {"indexer_types": INDEXER_SHARED, "hc_mult": 2},
    "inkling2_text": {
        "rel_extent": 16,
        "d_rel": 8,
        "log_scaling_n_floor": 8,
        "n_layers_per_attn_res_block": 2,
        "qk_l2_clip_threshold": 3.0,
        "rel_l2_clip_threshold": 2.0,
        "mlp_gate_softcap": 2.0,
        "mlp_up_softcap": 5.0,
    },
    "inkling_text": {
        "rel_extent": 16,
        "d_rel": 8,
        "log_scaling_n_floor": 8,
        "mlp_layer_types": DENSE_FIRST,
    },
    # Both kinds of mixer with both kinds of feed-forward; the default periods are longer than four
    # layers.
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "laguna": {
        "layer_types": SLIDING_FIRST,
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "mlp_layer_types": DENSE_FIRST,
        "moe_router_logit_softcapping": 5.0,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "full_attn_idxs": ...,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},  # none by default
    # Position-free and chunked layers, dense and expert ones, and a temperature that starts inside
    # 24 tokens.
    "llama4_text": {
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "moe_layers": [1, 2],
        "floor_scale": 8,
    },
    "longcat_flash": {"ffn_hidden_size": 112},
    "mamba2": {"num_heads": 8},  # heads x head_dim is expand x hidden_size
    "mellum": {"layer_types": SLIDING_FIRST, "mlp_layer_types": DENSE_FIRST},
    "minicpm3": {"dim_model_base": 32},  # logits are divided by hidden_size / this
    "minimax": {
        "block_size": 8,
        "full_attn_alpha_factor": 1.2,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.1,
        "linear_attn_beta_factor": 0.9,
        "mlp_alpha_factor": 1.3,
        "mlp_beta_factor": 0.7,
    },
    "minimax_m2": {"rope_parameters": HALF_ROTARY},
    "minimax_m3_vl_text": {
        "mlp_layer_types": DENSE_FIRST,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": SLIDING_FIRST},
    # Vision pieces are never run: they only have to build.
    "mllama_vision_model": {
        "image_size": 28,
        "num_global_layers": 1,
        "intermediate_layers_indices": [1, 2],
        "vision_output_dim": 192,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},  # skipped for text
    "moshi": {"num_codebooks": 2},
    "mpt": {"attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 4}},
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "phi4_multimodal": {
        "vision_config": {"image_size": 28, "crop_size": 28},
        "audio_config": {
            "input_size": 16,
            "num_blocks": 2,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 16,
            "nemo_final_size": 2,
        },
    },
    "qwen2": {"layer_types": SLIDING_FIRST},
    "qwen2_moe": {"layer_types": SLIDING_FIRST, "mlp_only_layers": [0]},
    "qwen3": {"layer_types": SLIDING_FIRST},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    # The sparse attention has no default sizes; n-gram embeddings enter two of the layers.
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 64,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 300,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 2,
        "eos_token_id": 2,
        "rope_parameters": HALF_ROTARY,
    },
    # Chunks and buckets that divide 24 tokens, and a fixed hash.
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 30,
        "shape_vocab_size": 40,
        "pronunciation_embed_dim": 24,
        "shape_embed_dim": 20,
    },
    "rwkv": {"rescale_every": 2},
    "smollm3": {"layer_types": SLIDING_FIRST, "no_rope_layers": [1, 0, 1, 0]},
    # The layers have no single-module form, and only its encoder form exists, causal by a flag.
    "xlm": {"is_encoder": True},
    "xlnet": {"attn_type": "uni", "mem_len": None},
    "xmod": {
        "languages": ["en_XX", "de_DE"],
        "default_language": "de_DE",
    },  # no language by default
    # The attention runs at twice the width, next to the embedding; its blocks are shared between
    # layers.
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {
        "attention_hidden_size": ...,
        "attention_head_dim": ...,
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    # One expert per token is all that it allows; windows are off by default.
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "router_hidden_size": 32,
    },
}

VARIANTS: dict[str, dict[str, Json]] = {
    "falcon/multi_query": {
        "new_decoder_architecture": False,
        "multi_query": True,
        "num_ln_in_parallel_attn": None,
    },
    "gpt_bigcode/heads": {"multi_query": False},
    "stablelm/plain": {"qk_layernorm": False},
}
"""More shapes of a type: "type/name" -> what differs from its tiny configuration."""
