"""What a type that sees needs beside the generic shrinkers: each entry says why."""

from __future__ import annotations

from typing import Any

from tests.zoo.overrides import DENSE_FIRST

Json = Any

BY_NATURE: dict[str, str] = {
    "diffusion_gemma": "writes blocks by diffusion: its loss is not the next token's",
    "evolla": "sees proteins, no pictures",
    "florence2": "an encoder-decoder",
    "mistral4": "has no vision in transformers",
    "pi0": "moves a robot: it writes actions",
    "pix2struct": "an encoder-decoder",
    "pp_formulanet": "an encoder-decoder",
    "t5gemma2": "an encoder-decoder",
    "udop": "an encoder-decoder",
    "vision-encoder-decoder": "an encoder-decoder",
}

TIMM = "its tower is a timm model, and timm is no dependency"
EVERY_CALL = "its forward wants pixels in every call"
CODEBOOK = "its pictures become ids of a codebook, whose tower is not trained"
NOT_PROVED: dict[str, str] = {
    "apertus1p5": CODEBOOK,
    "blip": (
        "its decoder takes the picture's features by cross-attention; no token stands for a picture"
    ),
    "blip-2": EVERY_CALL,
    "chameleon": CODEBOOK,
    "emu3": CODEBOOK,
    "fast_vlm": TIMM,
    "gemma3n": TIMM,
    "git": "the picture stands in front of the row: logits are not one a token",
    "granite_docling": (
        "its decoder scales what it is given, and with it the features that the "
        "adapter carries beside"
    ),
    "granite4_vision": "its loop adds features behind layers all along the decoder",
    "idefics": EVERY_CALL,
    "inkling2": (
        "its loop collects hidden states for later layers, and the adapter knows the text "
        "type alone"
    ),
    "inkling_mm_model": "its pictures have a shape of their own",
    "inkling2_loop": "its layers run more than once, in a loop",
    "instructblip": EVERY_CALL,
    "instructblipvideo": "sees videos",
    "kosmos-2": "no token stands for a picture: it is told where pictures are by a mask of its own",
    "kosmos-2.5": (
        "no token stands for a picture: it is told where pictures are by a mask of its own"
    ),
    "mllama": "its layers look at the picture by cross-attention; no token stands for one",
    "perception_lm": TIMM,
}

UNREAD = "transformers saves its weights under names that it does not read"
NOT_IN_A_PIPELINE: dict[str, str] = {"shieldgemma2": UNREAD}
ONCE_A_PICTURE = "its tower runs a module once a picture"
NOT_AT_ZERO_3: dict[str, str] = {
    **NOT_IN_A_PIPELINE,
    "hunyuan_vl": ONCE_A_PICTURE,
    "hy_v4_vl": ONCE_A_PICTURE,
    "lfm2_vl": ONCE_A_PICTURE,
    "lfm3_vl": ONCE_A_PICTURE,
    "minicpm_ocr": ONCE_A_PICTURE,
    "minicpmv4_6": ONCE_A_PICTURE,
    "minicpmv4_7": ONCE_A_PICTURE,
    "paddleocr_vl": ONCE_A_PICTURE,
}

PARTS: dict[str, dict[str, str]] = {
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
}
"""Parts that the default configuration leaves out."""


def sections(*parts: int) -> dict[str, Json]:
    """Rotary positions over time, height and width, which the class takes and has no default of."""
    table = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(parts)}
    return {"text_config": {"rope_parameters": table}}


VQ = {
    "embed_dim": 8,
    "num_embeddings": 16,
    "latent_channels": 8,
    "base_channels": 32,
    "num_res_blocks": 1,
}

VLM_OVERRIDES: dict[str, dict[str, Json]] = {
    # Codes of pictures end where those of sounds begin.
    "apertus1p5": {
        "vision_config": {
            "codebook_size": 16,
            "latent_channels": 32,
            "base_channels": 32,
            "num_res_blocks": 1,
        },
        "audio_config": {"codebook_dim": 64, "codebook_size": 16},
        "image_token_offset": 200,
        "audio_token_offset": 216,
    },
    "aria": {"projector_patch_to_query_dict": {"16": 4}},
    "deepseek_ocr2": {
        "vision_config": {"sam_config": {"downsample_channels": [32, 64]}},
        "text_config": {
            "mlp_layer_types": DENSE_FIRST,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {**sections(3, 3, 2)["text_config"], "moe_intermediate_size": [96, 48]}
    },
    "gemma4_unified": {"vision_config": {"model_patch_size": ...}},
    "glm46v": sections(2, 3, 3),
    "glm4v": sections(2, 3, 3),
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                **sections(1, 1, 2)["text_config"]["rope_parameters"],
                "partial_rotary_factor": 0.5,
            }
        }
    },
    "glm_ocr": sections(2, 3, 3),
    "glmga": sections(2, 3, 3),
    # No rotary part, and pools of positions that divide the chosen ones.
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0, "head_dim": 0}},
    "hunyuan_vl": sections(2, 2, 2, 2),
    "janus": {
        "vision_config": {"use_qk_norm": False},
        "vq_config": {**VQ, "channel_multiplier": [1, 1]},
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,  # hidden_size over the square of the shuffle's ratio
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        }
    },
    "minicpm_ocr": {
        "image_token_id": 255,
        "vision_config": {"insert_layer_id": 1},
        "insert_layer_id": 1,
    },
    "minicpmv4_6": {
        "image_token_id": 255,
        "vision_config": {"insert_layer_id": 1},
        "insert_layer_id": 1,
    },
    "minicpmv4_7": {
        "image_token_id": 255,
        "vision_config": {"insert_layer_id": 1},
        "insert_layer_id": 1,
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}, "image_patch_id": 255},
    "muse_glimmer": {"out_hidden_size": 256},  # four patches of the tower
    "muse_spark": {"out_hidden_size": 256, "audio_config": {"hidden_sizes": [16, 32, 48, 64]}},
    "nemotron_h_omni": {
        "image_token_id": 255,
        "vision_config": {
            "video_temporal_patch_size": 2,
            "max_img_size": 32,
            "patch_dim": 48,
            "video_patch_dim": 96,
        },
    },
    "paddleocr_vl": sections(2, 3, 3),
    "qwen2_5_omni_thinker": sections(2, 3, 3),
    "qwen2_5_vl": sections(2, 3, 3),
    "qwen2_vl": sections(2, 3, 3),
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [32, 64]}}},
    "vipllava": {"vision_feature_layer": [-1, -2]},
}
