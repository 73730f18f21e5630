"""The chunked loss, each type's tiny copy: where chunks give the model's own logits and gradients
is written into the table that the compiler reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.model_skeleton import patch_forwards
from shardwright.models.model_support import supports_chunked_loss
from tests.zoo.chunked_loss import why_not_chunked
from tests.zoo.configs import RUNNABLE, TEXT_VOCABULARY, randomize, tiny_config

Recorder = Callable[[str, str, dict[str, Any]], None]
TABLE = (
    Path(__file__).parents[2] / "compiler" / "shardwright" / "models" / "chunked_loss_types.json"
)
SAMPLE = (
    "llama",
    "gpt2",
    "gemma2",
    "cohere",
    "granite",
    "qwen3_moe",
    "opt",
    "bloom",
    "mamba",
    "deepseek_v3",
    "bert",
)


def outcome(model_type: str) -> str:
    """ "" where it is proved, else the reason."""
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**tiny_config(model_type)), dtype=torch.float32
        )
        randomize(model, 0)
        patch_forwards(model.train())
        return why_not_chunked(model, torch.randint(3, TEXT_VOCABULARY, (2, 13)))
    except Exception as error:  # whatever a type's own code raises
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def test_a_sample_of_types() -> None:
    for model_type in SAMPLE:
        why = outcome(model_type)
        assert (why == "") == supports_chunked_loss(model_type), (model_type, why)


def test_a_tail_that_looks_at_other_tokens_is_found() -> None:
    """What the table stands for: a head that is not one token's own affair is not proved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**tiny_config("llama")), dtype=torch.float32
    )
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden - hidden.mean(dim=1, keepdim=True))
    assert "differ" in why_not_chunked(model, torch.randint(3, TEXT_VOCABULARY, (2, 13)))


@pytest.mark.prove
def test_every_type(proved: Recorder) -> None:
    torch.set_num_threads(1)
    found = {t: outcome(t) for t in RUNNABLE}
    TABLE.write_text(json.dumps([t for t, why in found.items() if not why], indent=1) + "\n")
    for model_type, why in found.items():
        proved("chunked", model_type, {"chunked": why or "proved"})
    assert sum(not why for why in found.values()) >= 150
