"""Tiny copies of models that see."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.models.model_skeleton import patch_forwards
from shardwright.models.tiny_config import shrink, tiny_vision_encoder

# A tower of a few blocks, and rotary sections where the class leaves them out of its defaults.
QWEN = {"depth": 3, "fullatt_block_indexes": [1]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "vision_config": QWEN,
        "text_config": {"rope_parameters": {"mrope_section": [16, 24, 24]}},
    },
    "qwen3_vl": {
        "vision_config": {"depth": 4, "deepstack_visual_indexes": [0, 1, 3]},
        "text_config": {"rope_parameters": {"mrope_section": [24, 20, 20]}},
    },
    "llava": {"vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 3}},
    "smolvlm": {"vision_config": {"num_hidden_layers": 3}},
    "gemma3": {"vision_config": {"num_hidden_layers": 3}},
}


def tiny(model_type: str) -> Any:
    """In training mode, nothing random in it, with the adapters that a pipeline has."""
    document = CONFIG_MAPPING[model_type]().to_dict()
    for part, own in CONFIGS[model_type].items():
        for name, value in own.items():
            inner = document[part].get(name)
            document[part][name] = {**inner, **value} if isinstance(inner, dict) else value
    config = CONFIG_MAPPING[model_type].from_dict(tiny_vision_encoder(shrink(document), document))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).train()
    patch_forwards(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
