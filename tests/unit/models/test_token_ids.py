"""What the probes' texts hold: the special ids of a configuration, and none that stands for an
image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.models.graph_builder import build_model_graph
from shardwright.models.tasks.task_registry import CAUSAL_LM, IMAGE_TEXT
from shardwright.models.tiny_config import token_ids
from tests.unit.models.factory import model_section

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 260,
    "pad_token_id": 101,
    "bos_token_id": 7,
}


def config_of(**changes: Any) -> Any:
    return AutoConfig.for_model(**{**LLAMA, **changes})


def test_padding_begin_and_ends_stand_in_a_text() -> None:
    config = config_of(eos_token_id=[9, 200, 9999])
    assert token_ids(config).special == (0, 7, 9, 101, 200, 259)
    rows = CAUSAL_LM.example(config)
    assert set(token_ids(config).special) <= set(rows.flatten().tolist())
    assert not set(rows[:, 0].tolist()) & set(token_ids(config).special)


def test_what_stands_for_an_image_is_in_no_text() -> None:
    """EXAONE 4.5's image is the id 67, its video 68; some have a list, or the id in the
    configuration of the text."""
    config = AutoConfig.for_model(
        "qwen2_5_vl", image_token_id=67, video_token_id=68, text_config={"vocab_size": 260}
    )
    ids = token_ids(config)
    assert not {67, 68} & {*ids.plain, *ids.special}
    torch.manual_seed(0)
    drawn = torch.cat([CAUSAL_LM.example(config).flatten() for _ in range(50)])
    assert not {67, 68} & set(drawn.tolist()) and 66 in drawn


@pytest.mark.parametrize("token", [25, 67, 240])
def test_a_vision_language_model_is_planned_wherever_its_image_token_is(token: int) -> None:
    assert IMAGE_TEXT.traits.has_images
    section = model_section(
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": token,
            "video_token_id": token + 1,
            "vision_start_token_id": token + 2,
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
            },
            "text_config": {
                "vocab_size": 260,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [2, 3, 3],
                },
            },
        }
    )
    assert build_model_graph(section).task_traits.has_images


def test_a_padding_row_that_is_trained_shows_in_a_tiny_copy() -> None:
    """The text must hold the padding id, else its gradient is zero with and without padding_idx."""
    config = config_of()
    ids = CAUSAL_LM.example(config)
    kept, trained = (
        nn.Embedding(260, 4, padding_idx=padding) for padding in (config.pad_token_id, None)
    )
    for table in (kept, trained):
        table(ids).sum().backward()
    assert kept.weight.grad is not None and trained.weight.grad is not None
    assert not kept.weight.grad[101].any() and trained.weight.grad[101].all()
