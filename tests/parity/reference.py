"""What every layout is compared with; `shardwright verify` compares with the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.hf.reference import Reference, cosine, next_token_loss, token_rows, train

__all__ = ["Reference", "cosine", "initial_model", "next_token_loss", "token_rows", "train"]


def initial_model(config: dict[str, Any], seed: int) -> nn.Module:
    config = dict(config)
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.float32, trust_remote_code=False
    )
    return model
