"""Rows of hidden states go to the ranks that hold their experts, and what those made of them comes
back.

Letters: T tokens of this rank, k experts that each chose, H hidden size, E experts, e ranks that
share them out, R rows that this rank receives. Nothing is dropped: R is whatever the routers chose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from shardwright.models.mixture_of_experts import Experts


def dispatch_tokens(inner: Experts, experts: int, group: dist.ProcessGroup) -> Experts:
    """inner: the forward of a module that holds this rank's experts, which it numbers from zero.
    Rank r of the group has experts [r E/e, (r + 1) E/e). The routing weights are applied where the
    token is, so that their gradients are.
    """
    ranks = dist.get_world_size(group)
    local = experts // ranks

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(chosen.reshape(-1), stable=True)
        tokens = order // chosen.shape[-1]
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)
        arriving = torch.empty_like(
            counts
        )  # (e, E/e): of each sender, for each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (c.view(ranks, local).sum(dim=1).tolist() for c in (counts, arriving))
        rows = token_all_to_all(hidden[tokens], sent, received, group)
        numbers = (
            torch.arange(local, device=chosen.device).repeat(ranks).repeat_interleave(arriving)
        )
        made = token_all_to_all(
            _run(inner, rows, numbers.to(chosen.dtype), weights), received, sent, group
        )
        made = (made * weights.reshape(-1)[order, None]).to(hidden.dtype)
        return torch.zeros_like(hidden).index_add(0, tokens, made)

    return forward


def _run(
    inner: Experts, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """(R, H) -> (R, H), weighed with one. Without rows a dummy goes through: the other ranks wait
    in the backward pass, and every parameter gets a gradient."""
    received = rows.shape[0]
    if not received:
        rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
    return inner(rows, numbers[:, None], weights.new_ones(len(numbers), 1))[:received]


def token_all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """rows: (sum of sent, H), in the order of the ranks that they go to -> (sum of received, H), in
    the order of the ranks that they come from. Collective, in the backward pass too."""
    return _TokenAllToAll.apply(rows, sent, received, group)


class _TokenAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
