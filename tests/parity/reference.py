"""Trains the plain run that every layout and `shardwright verify` are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.verify.reference_run import (
    Reference,
    Rows,
    add_reference_lora,
    cosine,
    next_token_loss,
    train,
)

__all__ = [
    "Reference",
    "add_reference_lora",
    "cosine",
    "initial_model",
    "next_token_loss",
    "token_rows",
    "train",
]


def initial_model(config: dict[str, Any], seed: int) -> Any:
    config = dict(config)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config),
        dtype=torch.float32,
        trust_remote_code=False,
    )


def token_rows(tokens: NDArray[np.integer[Any]], step: int, batch: int) -> Rows:
    """Step k (from 1) of an unshuffled `tokens` data set, as one block of rows."""
    ids = torch.from_numpy(tokens[(step - 1) * batch : step * batch].astype(np.int64))
    return [{"input_ids": ids, "labels": ids}]
