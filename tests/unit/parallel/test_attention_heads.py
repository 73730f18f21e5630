"""An attention module that keeps head counts as attributes works on its rank's share of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.parallel.tensor_parallel import shard_attention_heads
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA


def model(config: dict[str, JsonValue]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def test_attributes_become_the_share() -> None:
    stablelm = model({**SMALL_LLAMA, "model_type": "stablelm"})  # eight heads, four key/value heads
    attention = stablelm.get_submodule("model.layers.0.self_attn")
    shard_attention_heads(stablelm, attention, rank=1, degree=2)
    assert (attention.num_heads, attention.num_key_value_heads) == (4, 2)
    assert (attention.num_key_value_groups, attention.hidden_size, attention.head_dim) == (2, 32, 8)


def test_groups_shrink_where_a_key_value_head_has_copies() -> None:
    llama = model(SMALL_LLAMA)
    attention = llama.get_submodule("model.layers.0.self_attn")
    shard_attention_heads(llama, attention, rank=5, degree=8)
    assert attention.num_key_value_groups == 1


class _PerHead(nn.Module):
    num_heads = 4

    def forward(
        self, hidden: object, alibi: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> object:
        return alibi, attention_mask


def test_arguments_with_a_value_for_every_head_are_cut() -> None:
    whole = model(SMALL_LLAMA)
    module = _PerHead()
    shard_attention_heads(whole, module, rank=1, degree=2)
    assert module.num_heads == 2
    alibi = torch.arange(8.0).reshape(8, 1, 1)  # batch 2 x heads 4
    per_head = torch.arange(4.0).reshape(1, 4, 1, 1)
    shared = torch.zeros(1, 1, 3, 3)
    got, mask = module(None, alibi, attention_mask=per_head)
    assert got.flatten().tolist() == [2, 3, 6, 7]
    assert mask.flatten().tolist() == [2, 3]
    assert module(None, alibi, shared)[1] is shared
