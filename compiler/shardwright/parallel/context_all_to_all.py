"""The one collective of a context group: what was whole in one dimension becomes whole in
another."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


class _HeadsAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = join, split, group
        return _transpose_over_ranks(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _transpose_over_ranks(gradient, *ctx.back), None, None, None


def _transpose_over_ranks(
    x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup
) -> torch.Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)


def heads_all_to_all(
    x: torch.Tensor, *, split: int, join: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Dimension `split` is cut over the group's ranks, which its size must divide by; their parts
    are joined along `join`, in the order of the ranks. The gradient takes the way back."""
    return _HeadsAllToAll.apply(x, split, join, group)
