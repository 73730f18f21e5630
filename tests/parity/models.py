"""Tiny configurations of the types that parity is proved for."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 257,  # odd: the vocabulary is cut unevenly under tensor parallelism
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 257,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "scale_attn_by_inverse_layer_idx": True,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
GPT_NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "hidden_size": 64,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 257,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}

MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gpt2-plain": {**GPT2, "scale_attn_by_inverse_layer_idx": False},
    "llama-deep": {**LLAMA, "num_hidden_layers": 8},
    "gpt2-deep": {**GPT2, "n_layer": 8},
    "gpt2-plain-deep": {**GPT2, "n_layer": 8, "scale_attn_by_inverse_layer_idx": False},
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-padding": {
        **LLAMA,
        "pad_token_id": 200,
    },  # behind the first half: the second tensor rank's
    "llama-tied-padding": {**LLAMA, "tie_word_embeddings": True, "pad_token_id": 5},
    "llama-rope": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "ministral3": {**LLAMA, "model_type": "ministral3", "head_dim": 16},
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 16},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    "phi": {**LLAMA, "model_type": "phi", "partial_rotary_factor": 0.5},
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
    "olmo": {**LLAMA, "model_type": "olmo"},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "olmo3": {**LLAMA, "model_type": "olmo3", "sliding_window": 8},
    "cohere2": {**LLAMA, "model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 8},
    "glm4": {**LLAMA, "model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "smollm3": {**LLAMA, "model_type": "smollm3", "pad_token_id": 0, "no_rope_layer_interval": 2},
    "stablelm": {**LLAMA, "model_type": "stablelm"},
    "starcoder2": {
        **LLAMA,
        "model_type": "starcoder2",
        **dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0),
    },
    "seed_oss": {
        **LLAMA,
        "model_type": "seed_oss",
        "head_dim": 16,
        **dict.fromkeys(("residual_dropout", "attention_dropout"), 0.0),
    },
    "gpt_neox": GPT_NEOX,
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
    # More experts than a rank's tokens choose in a step: each rank misses some, and others than its
    # neighbour.
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "olmoe": {**LLAMA, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral-odd": {
        **LLAMA,
        "model_type": "mixtral",
        "intermediate_size": 100,
        "num_local_experts": 4,
    },
    "mixtral-deep": {
        **LLAMA,
        "model_type": "mixtral",
        "num_hidden_layers": 8,
        "num_local_experts": 4,
    },
    # The first layers are dense: a stage has no experts.
    "dense-first": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0, 1],
    },
    "deepseek_v3": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        **LLAMA,
        "model_type": "glm4_moe",
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": GPT_OSS,
    # A soft cap on the logits, a divisor, a factor.
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 0.5},
    "granite": {**LLAMA, "model_type": "granite", "logits_scaling": 4.0},
    "cohere": {**LLAMA, "model_type": "cohere", "logit_scale": 0.25},
    "opt": {**OPT, "dropout": 0.0, "attention_dropout": 0.0},
    "bloom": BLOOM,
    # Under Muon rounding errors matter where a gradient, or the lead of a chosen expert, is near 0:
    # with larger weights neither is.
    # Rows of 512: two tensor ranks cut no block of 256 elements.
    "llama-512": {
        **LLAMA,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    },
    "gpt2-512": {**GPT2, "n_embd": 512, "n_layer": 2, "initializer_range": 0.1},
    "gpt2-wide": {**GPT2, "initializer_range": 0.1},
    "gpt2-plain-wide": {
        **GPT2,
        "scale_attn_by_inverse_layer_idx": False,
        "initializer_range": 0.1,
    },
    "qwen3_moe-wide": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "initializer_range": 0.1,
    },
    "gpt_neox-wide": {**GPT_NEOX, "initializer_range": 0.1},
    "bloom-wide": {**BLOOM, "initializer_range": 0.1},
    "gpt_oss-wide": {**GPT_OSS, "initializer_range": 0.1},
    "dense-first-wide": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0, 1],
        "initializer_range": 0.1,
    },
    # Its base model drops out by itself, in no module.
    "opt-dropout": OPT,
    "gpt2-dropout": {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
MIXTURES = ("deepseek_v3", "glm4_moe", "dense-first")
"""Mixtures of experts with dense layers beside them, the first two with a shared expert too."""
