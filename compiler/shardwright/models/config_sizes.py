"""Sizes that modules and configurations hold under one of several names."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

HEAD_ATTRIBUTES: dict[str, str] = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_key_value_heads": "key_value_heads",
    "num_kv_heads": "key_value_heads",
    "kv_heads": "key_value_heads",
    "num_key_value_groups": "groups",
    "embed_dim": "width",
    "hidden_size": "width",
    "split_size": "width",
    "all_head_size": "width",
}
"""Where attention modules keep their head counts: attribute name -> what it counts. Widths are
heads x head size."""


def first_size(owner: nn.Module | PretrainedConfig, *names: str) -> int | None:
    """The first of these that the owner has as one number; some types have one a layer, or none."""
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # transformers refuses to answer for an attribute that varies by layer
            continue
        if isinstance(value, int) and value:
            return value
    return None


def head_counts(module: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    """(query heads, key/value heads) of one attention module: its own attributes, else the
    configuration's."""
    names = {
        kind: [n for n, k in HEAD_ATTRIBUTES.items() if k == kind]
        for kind in HEAD_ATTRIBUTES.values()
    }
    heads = first_size(module, *names["heads"]) or first_size(config, *names["heads"]) or 1
    key_value_heads = first_size(module, *names["key_value_heads"])
    groups = first_size(module, *names["groups"])
    if key_value_heads is None and groups:
        key_value_heads = heads // groups
    return heads, key_value_heads or first_size(config, *names["key_value_heads"][:1]) or heads
