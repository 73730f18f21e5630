"""The tower's work: FLOPs against torch's own counter at real size, bytes against what real steps
keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from shardwright.models.layer_trace import fake_parameters, stub_parameters
from shardwright.models.model_graph import PipelineSplit, VisionEncoder
from shardwright.models.vision_trace import trace_vision_encoder
from tests.zoo.vision_language_configs import vlm_config

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
CLIP_L = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
SIGLIP_400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
QWEN = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "depth": 32,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN3 = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "depth": 27,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SECTIONS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
MODELS: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": CLIP_L, "text_config": {"model_type": "llama", **TEXT}},
    "gemma3": {"mm_tokens_per_image": 256, "vision_config": SIGLIP_400M, "text_config": TEXT},
    "qwen2_5_vl": {"vision_config": QWEN, "text_config": {**TEXT, "rope_parameters": SECTIONS}},
    "qwen3_vl": {"vision_config": QWEN3, "text_config": {**TEXT, "rope_parameters": SECTIONS}},
}
CUT = PipelineSplit(
    stack="model.language_model.layers", hidden_position=0, hidden_keyword=None, output_length=0
)


def build(model_type: str, attention: str | None = None, **tower: Any) -> Any:
    document = MODELS[model_type]
    vision = {**document["vision_config"], **tower}
    config = AutoConfig.for_model(model_type, **{**document, "vision_config": vision})
    return AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )


def build_on_meta(model_type: str, **options: Any) -> Any:
    with torch.device("meta"):
        return build(model_type, **options)


def counted_flops(model: Any, **inputs: torch.Tensor) -> int:
    """By torch, of the whole tower at once, with eager attention: its counter does not know the
    CPU's fused one."""
    stub_parameters(model, torch.float32)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_parameters(list(model.modules()), fake), FlopCounterMode(display=False) as counter:
        model.get_image_features(**inputs)
    return int(counter.get_total_flops())


@functools.cache
def traced(model_type: str) -> VisionEncoder:
    found = trace_vision_encoder(build_on_meta(model_type), CUT)
    assert not found.untraced, found.untraced
    return found


def forward_flops(vision: VisionEncoder, patches: int) -> int:
    return sum(layer.forward.of(patches) for layer in vision.layers)


def real_size(model_type: str) -> tuple[int, int]:
    """FLOPs of one picture: (as planned, as torch counts)."""
    side = MODELS[model_type]["vision_config"]["image_size"]
    counted = counted_flops(
        build_on_meta(model_type, attention="eager"), pixel_values=torch.zeros(1, 3, side, side)
    )
    return forward_flops(traced(model_type), (side // 14) ** 2), counted


@pytest.mark.parametrize(("model_type", "gflops"), [("llava", 381.9), ("gemma3", 5460.4)])
def test_a_tower_of_one_size_at_real_size(model_type: str, gflops: float) -> None:
    found, counted = real_size(model_type)
    assert found == pytest.approx(counted, rel=0.01)
    assert found == pytest.approx(
        gflops * 1e9, rel=0.01
    )  # L (2n (4h^2 + 2hf) + 4n^2 h) + 2n C P^2 h


@pytest.mark.prove
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_picture_of_another_size_than_was_traced(model_type: str) -> None:
    found, counted = another_size(model_type)
    assert found == pytest.approx(counted, rel=0.01)


def another_size(model_type: str) -> tuple[int, int]:
    """FLOPs of a picture of 24 x 40 patches: (as planned, as torch counts)."""
    depth = {"depth": 8, "fullatt_block_indexes": [3, 7]} if model_type == "qwen2_5_vl" else {}
    tower = MODELS[model_type]["vision_config"]
    inputs = {
        "pixel_values": torch.zeros(24 * 40, 3 * 2 * tower["patch_size"] ** 2),
        "image_grid_thw": torch.tensor([[1, 24, 40]]),
    }
    counted = counted_flops(build_on_meta(model_type, attention="eager", **depth), **inputs)
    found = (
        trace_vision_encoder(build_on_meta(model_type, **depth), CUT)
        if depth
        else traced(model_type)
    )
    return forward_flops(found, 24 * 40), counted


SHAPES: dict[str, tuple[str, int, dict[str, torch.Tensor]]] = {
    "llava_next": ("language_model", 16, {"image_sizes": torch.tensor([[32, 32]])}),  # of each tile
    "smolvlm": ("text_model", 16, {}),  # rows of pictures
    "internvl": ("language_model", 16, {}),
    "lfm2_vl": ("language_model", 0, {}),  # patches, padded
}
"""A tiny copy's text part, the patches of every picture, and what counting wants beside the
pixels."""


@pytest.mark.parametrize("model_type", SHAPES)
def test_towers_take_pictures_in_other_shapes(model_type: str) -> None:
    text, patches, beside = SHAPES[model_type]
    config = AutoConfig.for_model(**vlm_config(model_type))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    found = trace_vision_encoder(
        model,
        PipelineSplit(
            stack=f"model.{text}.layers", hidden_position=0, hidden_keyword=None, output_length=0
        ),
    )
    assert not found.untraced and found.patches == patches and len(found.layers) == 5
    if patches:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        tiles = {"llava_next": 5, "smolvlm": 1}.get(model_type)
        pixels = (1, 3, 16, 16) if tiles is None else (1, tiles, 3, 16, 16)
        counted = counted_flops(model, pixel_values=torch.rand(pixels), **beside)
        assert (tiles or 1) * forward_flops(found, patches) == pytest.approx(counted, rel=0.01)


BYTES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("num_hidden_layers", {"image_size": 448}),
    "qwen2_5_vl": ("depth", {"fullatt_block_indexes": []}),
}
"""How a tower says its depth, and what makes it small enough for a step here."""


def kept_of(model_type: str) -> tuple[dict[str, int], int, int]:
    """(bytes that each layer is planned to keep of a picture, those that real steps of one and of
    two blocks save)."""
    depth, sizes = BYTES[model_type]
    found = trace_vision_encoder(build_on_meta(model_type, **sizes), CUT)
    assert not found.untraced, found.untraced
    patches = found.patches or 24 * 16
    kept = {
        layer.name: next(
            k for k in layer.kept if k.element_bytes == 4 and k.checkpointing == "none"
        ).bytes.of(patches)
        for layer in found.layers
    }
    one, two = (
        kept_in_a_real_step(build(model_type, **{**sizes, depth: n}), patches) for n in (1, 2)
    )
    return kept, one, two


@pytest.mark.prove
@pytest.mark.parametrize("model_type", BYTES)
def test_kept_bytes_against_real_steps_of_one_and_two_blocks(model_type: str) -> None:
    """Extrapolated to all blocks: a block is the difference."""
    kept, one, two = kept_of(model_type)
    blocks = len(kept) - 1
    assert sum(kept.values()) == pytest.approx(one + (blocks - 1) * (two - one), rel=0.1)
    for name in list(kept)[:-1]:
        assert kept[name] == pytest.approx(two - one, rel=0.1), name


@pytest.mark.prove
@pytest.mark.parametrize("model_type", MODELS)
def test_flops_of_towers_are_recorded(model_type: str, proved: Callable[..., None]) -> None:
    found, counted = (another_size if model_type.startswith("qwen") else real_size)(model_type)
    proved(
        "tower",
        f"{model_type}: FLOPs",
        {"planned": found, "counted": counted, "apart": found / counted - 1},
    )
    assert found == pytest.approx(counted, rel=0.01)


@pytest.mark.prove
@pytest.mark.parametrize("model_type", BYTES)
def test_kept_bytes_of_towers_are_recorded(model_type: str, proved: Callable[..., None]) -> None:
    kept, one, two = kept_of(model_type)
    planned, real = sum(kept.values()), one + (len(kept) - 2) * (two - one)
    proved(
        "tower",
        f"{model_type}: bytes",
        {"planned": planned, "extrapolated": real, "apart": planned / real - 1},
    )
    assert planned == pytest.approx(real, rel=0.1)


def kept_in_a_real_step(model: Any, patches: int) -> int:
    """Bytes of the distinct storages that autograd saves of a picture, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    if model.config.model_type == "gemma3":
        side = model.config.vision_config.image_size
        inputs = {"pixel_values": torch.randn(1, 3, side, side)}
    else:
        inputs = {
            "pixel_values": torch.randn(patches, 1176),
            "image_grid_thw": torch.tensor([[1, 16, patches // 16]]),
        }
    known = {t.untyped_storage().data_ptr() for t in inputs.values()}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.get_image_features(**inputs)
    assert output.pooler_output is not None
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in known)


def test_parts_of_a_model() -> None:
    llava, qwen, gemma = traced("llava"), traced("qwen3_vl"), traced("gemma3")
    assert llava.part("model.multi_modal_projector.linear_1.weight") == "projector"
    assert llava.part("model.vision_tower.embeddings.class_embedding") == "vision"
    assert llava.part("model.language_model.embed_tokens.weight") == "text"
    assert qwen.part("model.visual.merger.linear_fc1.weight") == "projector"
    assert qwen.part("model.visual.deepstack_merger_list.1.norm.weight") == "projector"
    assert qwen.part("model.visual.blocks.3.attn.qkv.weight") == "vision"
    assert qwen.part("lm_head.weight") == "text"
    assert gemma.part("model.multi_modal_projector.mm_input_projection_weight") == "projector"
    assert gemma.part("model.vision_tower.post_layernorm.weight") == "vision"
    assert (llava.patches, gemma.patches, qwen.patches) == (576, 4096, 0)
    assert (gemma.patches_per_token, qwen.patches_per_token) == (16, 4)
