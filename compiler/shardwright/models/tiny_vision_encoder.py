"""A vision tower made narrow, beside what models/tiny_config.py does to any configuration: small
pictures of few patches, and widths that fit the decoder's. It keeps its depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATCH, SIDE = 4, 4
"""Pixels of a patch's side, patches of a picture's side."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_PICTURE_SIZES = ("image_size", "image_resolution", "crop_size")
_DEPTHS = ("depth", "num_hidden_layers", "num_layers", "n_layers")
_TO_TEXT = ("out_hidden_size", "projection_dim", "output_dim", "text_hidden_size")
_ENCODER_HEADS = ("encoder_attention_heads", "num_encoder_attention_heads")
_TOKENS = ("mm_tokens_per_image", "image_seq_length", "num_image_tokens")


def tiny_vision_encoder(
    document: Mapping[str, Any], real: Mapping[str, Any], text_width: int | None = None
) -> dict[str, Any]:
    """document: `real`, a configuration, as shrink() made it tiny. The same with its towers' sizes
    made tiny too. text_width: of the decoder that a part stands beside."""
    text: Mapping[str, Any] = next(
        (document[name] for name in _TEXT if isinstance(document.get(name), dict)), document
    )
    width = text.get("hidden_size") if text_width is None else text_width
    out: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict) and isinstance(value.get("patch_size"), int):
            out[name] = _tower(value, real[name], width)
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
    return {**out, **_of_towers(out, real)}


def equalize_encoder_widths(document: Mapping[str, Any]) -> dict[str, Any]:
    """document: as tiny_vision_encoder made it, of a model that compares features of texts and
    pictures: both are as wide."""
    sides = {
        name: value for name, value in document.items() if name in _TEXT and isinstance(value, dict)
    }
    tower = next((v for v in document.values() if isinstance(v, dict) and "patch_size" in v), {})
    return {
        **document,
        **{
            name: {**side, "projection_size": tower["hidden_size"]}
            for name, side in sides.items()
            if "projection_size" in side
        },
    }


def _of_towers(document: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of its tower beside it."""
    names = [
        name
        for name, value in document.items()
        if isinstance(value, dict) and "patch_size" in value
    ]
    name = next(iter(names), None)
    if name is None:
        return {}
    tower, real_tower, out = document[name], real[name], {}
    wide, real_wide = tower.get("hidden_size"), real_tower.get("hidden_size")
    for key, value in real.items():
        if isinstance(value, int) and key.endswith("hidden_size") and wide and real_wide:
            if value == real_wide:
                out[key] = wide
            elif (
                value == real_wide * (tower.get("merge_size") or 0) ** 2
            ):  # of the patches of one token
                out[key] = wide * tower["merge_size"] ** 2
        elif key == "image_grid_pinpoints" and isinstance(value, list):
            tile = real_tower["image_size"]
            out[key] = [[PATCH * SIDE * side // tile for side in pair] for pair in value]
    return out


def _sections(text: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary sections over time, height and width, which share out half a head: shrink() leaves out
    lists that are as long as the real one."""
    for name in ("rope_parameters", "rope_scaling"):
        table, small = real.get(name), text.get(name)
        if (
            isinstance(table, dict)
            and isinstance(small, dict)
            and isinstance(table.get("mrope_section"), list)
        ):
            sizes, half = table["mrope_section"], _head(text) // 2
            parts = [max(1, half * size // sum(sizes)) for size in sizes[:-1]]
            return {name: {**small, "mrope_section": [*parts, half - sum(parts)]}}
    return {}


def _head(text: Mapping[str, Any]) -> int:
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    rotated = (text.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    return int(size * rotated)


def _tower(
    document: Mapping[str, Any], real: Mapping[str, Any], text_width: int | None
) -> dict[str, Any]:
    merge = document.get("spatial_merge_size") or 1
    out = dict(document)
    for name, value in document.items():
        if name in _PICTURE_SIZES and isinstance(value, int):
            out[name] = PATCH * SIDE
        elif name in _PICTURE_SIZES and isinstance(value, list):
            out[name] = [PATCH * SIDE] * len(value)
        elif name in _DEPTHS or (isinstance(value, list) and "layer" in name):
            out[name] = real[
                name
            ]  # which blocks a model takes features from is told by their numbers
        elif name in _TO_TEXT and isinstance(value, int) and text_width is not None:
            out[name] = text_width
    width, inner = real.get("hidden_size"), real.get("intermediate_size")
    if width and inner and not inner % width:  # what is as wide as so many patches
        out["intermediate_size"] = inner // width * out["hidden_size"]
    if isinstance(document.get("patch_size"), int):
        out["patch_size"] = PATCH
    if isinstance(document.get("window_size"), int):
        out["window_size"] = PATCH * merge * 2
    if isinstance(document.get("num_position_embeddings"), int):
        out["num_position_embeddings"] = SIDE * SIDE
    return out
