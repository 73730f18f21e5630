"""The input embedding cut by vocabulary, and the head's logits that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.parallel.tensor_parallel_collectives import (
    all_reduce_gradient,
    reduce_from_tensor_region,
)


def shard_embedding_lookup(
    module: nn.Module, table: ParameterSharding, group: dist.ProcessGroup
) -> None:
    """Each rank looks up the ids whose rows it holds, with the embedding's own forward (scale,
    norm); the sum is whole.

    padding_idx keeps its meaning (no gradient for that row) on the rank that holds it.
    """
    ((first, held),) = table.pieces(dist.get_rank(group))
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        local = padding - first if first <= padding < first + held else None
        setattr(module, "padding_idx", local)  # noqa: B010
    for name, parameter in module.named_parameters():
        if name != "weight":  # a norm behind the lookup sees one rank's tokens only
            all_reduce_gradient(parameter, group)
    inner = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        elsewhere = (ids < first) | (ids >= first + held)
        own = inner((ids - first).masked_fill(elsewhere, 0), *args, **kwargs)
        return reduce_from_tensor_region(own.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    module.forward = forward
