"""Sizes that modules and configurations hold under one of several names."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig


def size_of(owner: nn.Module | PretrainedConfig, *names: str) -> int | None:
    """The first of these that the owner has as one number; some types have one a layer, or none."""
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # transformers refuses to answer for an attribute that varies by layer
            continue
        if isinstance(value, int) and value:
            return value
    return None
