"""A model's own attention function, run on all tokens of a row and a share of its heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.parallel.context_all_to_all import heads_all_to_all

Attention = Callable[..., tuple[torch.Tensor, Any]]
"""What transformers' attention interface holds: (module, query (B, H, S, D), key, value (B, K, S,
D), mask, ...) -> (output (B, S, H, D), weights or None)."""


class _LocalHeadsView:
    """An attention module to the function that reads it, with other values of what depends on the
    number of heads."""

    def __init__(self, module: nn.Module, values: dict[str, Any]) -> None:
        self._module = module
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def ulysses_attention(
    inner: Attention,
    group: dist.ProcessGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`inner` for S/s tokens of each rank. attention_mask: of the whole row. Raises ValueError
    where the heads do not divide over the ranks."""
    ranks, heads = dist.get_world_size(group), query.shape[1]
    if heads % ranks:
        raise ValueError(f"{heads} attention heads do not divide over {ranks} context ranks")
    first, own = dist.get_rank(group) * heads // ranks, heads // ranks

    def of_own_heads(x: Any, dimension: int) -> Any:
        """Of a tensor with a value for each head."""
        if (
            not isinstance(x, torch.Tensor)
            or x.ndim <= dimension
            or x.shape[dimension] != heads
            or heads == 1
        ):
            return x
        return x.narrow(dimension, first, own)

    def whole_row(x: torch.Tensor) -> torch.Tensor:
        # Keys' heads that the ranks do not divide are repeated: each rank has those that its
        # queries read.
        copies = math.lcm(x.shape[1], ranks) // x.shape[1]
        return heads_all_to_all(
            x.repeat_interleave(copies, dim=1) if copies > 1 else x, split=1, join=2, group=group
        )

    query, key, value = whole_row(query), whole_row(key), whole_row(value)
    values: dict[str, Any] = {}
    if hasattr(module, "num_key_value_groups"):
        values["num_key_value_groups"] = query.shape[1] // key.shape[1]
    if hasattr(module, "sinks"):
        values["sinks"] = of_own_heads(module.sinks, 0)
    if "s_aux" in kwargs:
        kwargs["s_aux"] = of_own_heads(kwargs["s_aux"], 0)
    mask = of_own_heads(attention_mask, 1)
    output, _ = inner(_LocalHeadsView(module, values), query, key, value, mask, *args, **kwargs)
    return heads_all_to_all(output, split=1, join=2, group=group), None
