"""A probe that meets a NaN, wherever it stands, has proved nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from shardwright.diagnostics import Refusal
from shardwright.models import graph_trace
from shardwright.models.layer_split import find_layer_split
from shardwright.models.model_probe import packing_blocker
from shardwright.models.tasks.causal_lm import is_causal
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from tests.unit.models.factory import SMALL_LLAMA
from tests.zoo import chunked_loss
from tests.zoo.chunked_loss import why_not_chunked


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SMALL_LLAMA), dtype=torch.float32
    )


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(1))


class Planted(nn.Module):
    """A head whose last logit of each row is a value."""

    def __init__(self, head: nn.Module, value: float) -> None:
        super().__init__()
        self.head, self.value = head, value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], self.value)], dim=-1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits(model: Any, value: float) -> None:
    cut = find_layer_split(model, tokens(24))
    assert why_not_chunked(model, tokens(13)) == "" == packing_blocker(model, cut, tokens(24))
    assert is_causal(model, tokens(24))
    model.lm_head = Planted(model.lm_head, value)
    assert "differ" in why_not_chunked(model, tokens(13))
    assert "not finite" in packing_blocker(model, cut, tokens(24))
    assert not is_causal(model, tokens(24))


def test_a_gradient_that_is_not_the_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = chunked_loss._gradients, []

    def planted(logits: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        found = plain(logits, parameters)
        calls.append(len(found))
        if len(calls) == 1:
            found[1] = torch.full_like(found[1], math.nan)
        return found

    monkeypatch.setattr(chunked_loss, "_gradients", planted)
    assert "the gradients of its chunks differ by inf" in why_not_chunked(model, tokens(13))


def test_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_trace, "flash_attention_error", lambda config: math.nan)
    with pytest.raises(Refusal, match="SW2008"):
        graph_trace._check_flash(LlamaConfig(), FLASH_ATTENTION_2)
