"""Cross-entropy over logits whose vocabulary is cut over the tensor ranks: no rank ever holds a
whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        first: int,
        ignored: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        highest = logits.float().amax(dim=-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.float() - highest.unsqueeze(-1)
        counts = target != ignored
        here = counts & (target >= first) & (target < first + logits.shape[-1])
        place = (target - first).masked_fill(~here, 0).unsqueeze(-1)
        own = (
            shifted.gather(-1, place).squeeze(-1).masked_fill(~here, 0.0)
        )  # 0 on the ranks that do not hold it
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), own])
        dist.all_reduce(sums, group=group)
        softmax = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, place, here, counts)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        softmax, place, here, counts = ctx.saved_tensors
        scale = gradient.float().masked_fill(~counts, 0.0).unsqueeze(-1)
        wanted = (softmax * scale).scatter_add_(-1, place, -scale * here.unsqueeze(-1))
        return wanted.to(ctx.dtype), None, None, None, None


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    first: int,
    ignored: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """logits (..., V of this rank), target (...) ids of the whole vocabulary -> (...) fp32 losses,
    0 where `ignored`.

    first: the vocabulary's id of this rank's first logit. Computed in fp32; the gradient has the
    logits' type.
    """
    return _CrossEntropy.apply(logits, target, first, ignored, group)
