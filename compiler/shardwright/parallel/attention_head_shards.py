"""Attention modules that keep their head counts as attributes work on their share of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shardwright.models.config_sizes import HEAD_ATTRIBUTES, head_counts

# Arguments that hold a value for every head: name -> the heads' dimension. ALiBi joins batch and
# heads in dimension 0.
HEAD_ARGUMENTS: dict[str, int] = {"alibi": 0, "position_bias": 0, "attention_mask": 1}


def shard_attention_heads(model: nn.Module, module: nn.Module, rank: int, degree: int) -> None:
    """Edits the attributes in place; arguments that hold a value for every head are cut when they
    come in."""
    config: Any = model.config
    heads, key_value_heads = head_counts(module, config.get_text_config())
    own, own_key_value = heads // degree, max(1, key_value_heads // degree)
    counts = {"heads": own, "key_value_heads": own_key_value, "groups": own // own_key_value}
    for name, kind in HEAD_ATTRIBUTES.items():
        if isinstance(value := getattr(module, name, None), int):
            setattr(module, name, value // degree if kind == "width" else counts[kind])
    inner, names = module.forward, tuple(inspect.signature(module.forward).parameters)

    def own_heads(name: str, x: Any) -> Any:
        return _own_heads(name, x, heads, rank, degree)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cut = [own_heads(name, x) for name, x in zip(names, args, strict=False)]
        return inner(
            *cut, *args[len(cut) :], **{name: own_heads(name, x) for name, x in kwargs.items()}
        )

    if HEAD_ARGUMENTS.keys() & set(names):
        module.forward = forward


def _own_heads(name: str, x: Any, heads: int, rank: int, degree: int) -> Any:
    dimension = HEAD_ARGUMENTS.get(name)
    if dimension is None or not isinstance(x, torch.Tensor) or x.ndim <= dimension:
        return x
    count = x.shape[dimension]
    if name == "attention_mask" and (x.ndim != 4 or count != heads or heads == 1):
        return x  # one mask for all heads
    if count % heads:
        return x
    split = x.unflatten(dimension, (count // heads, heads))
    own = heads // degree
    return split.narrow(dimension + 1, rank * own, own).flatten(dimension, dimension + 1)
