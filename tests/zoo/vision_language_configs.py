"""A tiny configuration for every type that transformers maps to AutoModelForImageTextToText: the
text part as the zoo of causal models has it (configs.py), and towers of few blocks on pictures of
few patches.

What a type needs beside that is in vision_language_overrides.py.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.zoo.configs import _merge, _shrink, defaults, randomize
from tests.zoo.vision_language_overrides import BY_NATURE, PARTS, VLM_OVERRIDES

Json = Any

VLM_TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
IMAGE_TASKS: tuple[str, ...] = tuple(t for t in VLM_TYPES if t not in BY_NATURE)

WIDTH, BLOCKS, PATCH, SIDE = 64, 4, 4, 4
"""Hidden size of all parts, blocks of a tower, pixels of a patch's side, patches of a picture's
side."""
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
POSITIONS = 512

TOWER_SIZES: dict[str, Json] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "n_layers"), BLOCKS),
    **dict.fromkeys(
        ("embed_dim", "hidden_size", "d_model", "out_hidden_size", "projection_dim"), WIDTH
    ),
    **dict.fromkeys(
        ("output_dim", "text_hidden_size", "adapter_out_dim", "vision_output_dim"), WIDTH
    ),
    **dict.fromkeys(("num_heads", "num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_position_embeddings", "num_patches"), SIDE * SIDE),
    **dict.fromkeys(("encoder_layers", "num_mel_bins"), 2),
    "encoder_ffn_dim": 96,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 2],
}
TO_TEXT = (
    "out_hidden_size",
    "projection_dim",
    "projection_hidden_size",
    "projector_hidden_size",
    "vision_hidden_size",
)
PIXELS = ("image_size", "image_resolution", "crop_size", "max_image_size")


def vlm_config(model_type: str) -> dict[str, Json]:
    """A plain JSON document with "model_type". Raises KeyError for a type that is none of
    SEEING."""
    if model_type not in IMAGE_TASKS:
        raise KeyError(f"{model_type}: {BY_NATURE.get(model_type, 'not a vision-language type')}")
    parts = {name: defaults(part) for name, part in PARTS.get(model_type, {}).items()}
    real = {**defaults(model_type), **parts}
    made = _shrink(model_type, real, random.Random(model_type))
    made = _towers(made, real)
    return copy.deepcopy(_merge(made, VLM_OVERRIDES.get(model_type, {})))


def _towers(
    made: dict[str, Json], real: dict[str, Json], *, tower: bool = False
) -> dict[str, Json]:
    """`made` is `real` with the text's sizes made small: the towers' too. tower: this part is
    one."""
    out = dict(made)
    for name, value in real.items():
        if isinstance(value, dict) and "model_type" in value:
            out[name] = _towers(made.get(name, value), value, tower=name not in TEXT)
        elif tower and name in TOWER_SIZES and value is not None:
            out[name] = TOWER_SIZES[name]
        elif name in PIXELS and isinstance(value, int | list | tuple):
            out[name] = (
                [PATCH * SIDE] * len(value) if isinstance(value, list | tuple) else PATCH * SIDE
            )
        elif name == "patch_size" and value is not None:
            out[name] = [PATCH] * len(value) if isinstance(value, list | tuple) else PATCH
        elif name == "window_size" and tower:
            out[name] = PATCH * 2 * (real.get("spatial_merge_size") or 1)
        elif name == "image_grid_pinpoints":
            side = PATCH * SIDE
            out[name] = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
        elif name in ("mm_tokens_per_image", "image_seq_length", "num_image_tokens"):
            out[name] = SIDE if name == "mm_tokens_per_image" else SIDE * SIDE
        elif name == "max_position_embeddings" and not tower:
            out[name] = POSITIONS
        elif name in TO_TEXT and value is not None:
            out[name] = WIDTH
        elif name == "rope_parameters" and not tower and isinstance(out.get(name), dict):
            out[name] = _sections(out[name], out)
    return out


def _sections(table: dict[str, Json], text: dict[str, Json]) -> dict[str, Json]:
    """Rotary sections share out half of what is rotated of a head."""
    if any(isinstance(value, dict) for value in table.values()):
        return {n: _sections(v, text) if isinstance(v, dict) else v for n, v in table.items()}
    if "mrope_section" not in table:
        return table
    half = int(text.get("head_dim", 16) * table.get("partial_rotary_factor", 1.0)) // 2
    first = half // len(table["mrope_section"])
    rest = [first] * (len(table["mrope_section"]) - 1)
    return {**table, "mrope_section": [*rest, half - sum(rest)]}


def build_vlm(model_type: str, seed: int = 0) -> Any:
    """The tiny model on the CPU in fp32, train mode, weights drawn from the seed."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**vlm_config(model_type))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.train()
    return model
