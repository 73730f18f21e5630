"""Which types can have their rows cut over ranks: found on one process, with the reason where they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from shardwright.hf.context import why_no_context
from tests.zoo.configs import tiny_config

INTERFACE = "its attention does not go through transformers' attention interface"
MIXES = "its tokens see each other outside of attention"
COUNTS = "it counts its positions itself"
MASKS = "it uses the mask outside of attention"
FOUND = {
    "llama": "",
    "gpt2": "",
    "gemma2": "",
    "gpt_oss": "",
    "deepseek_v3": "",
    "opt": "",
    "bloom": INTERFACE,
    "mamba": INTERFACE,
    "jamba": MIXES,
    "lfm2": MIXES,
    "qwen3_next": MIXES,
    "roberta": COUNTS,
    "llama4_text": COUNTS,
    "deepseek_v32": MASKS,
    "doge": MASKS,
}


def model_of(model_type: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(model_type)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def ids() -> torch.Tensor:
    return torch.randint(8, 100, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", FOUND)
def test_each_type_has_its_answer(model_type: str) -> None:
    interface = AttentionInterface.get_interface
    assert why_no_context(model_of(model_type), ids()) == FOUND[model_type]
    assert AttentionInterface.get_interface is interface


def test_what_is_not_a_number_is_no_proof() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    assert why_no_context(model, ids()) == "a tiny copy's logits are not finite"


def test_a_neighbour_that_leaks_into_a_norm_is_seen() -> None:
    class Leaks(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.01 * hidden.roll(1, dims=1)

    model = model_of("llama")
    model.model.norm = Leaks()
    assert why_no_context(model, ids()) == MIXES
