"""The balance loss of a plan's routers, under whatever engine."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn

from shardwright.models.router_aux_loss import RouterAuxLoss
from shardwright.plan.plan import Plan


def router_balance(
    plan: Plan, model: nn.Module, group: dist.ProcessGroup | None = None
) -> RouterAuxLoss | None:
    """model: the whole one, before any of it is cut. group: the context ranks of this rank's rows,
    or None."""
    balance, context = plan.model.router_aux_loss, plan.strategy.context
    if balance is None:
        return None

    def summed(counts: torch.Tensor) -> torch.Tensor:
        if group is not None:
            dist.all_reduce(counts, group=group)
        return counts

    piece = 0 if group is None else dist.get_rank(group)
    routers = RouterAuxLoss(model, balance.coefficient, balance.affinity, context, piece, summed)
    routers.length = plan.training.sequence_length // context
    return routers


def micro_batch_weight(plan: Plan, micro_batches: int) -> float:
    """Engines average over micro-batches and over data x context ranks; context ranks have a part
    of each row."""
    return plan.strategy.context / micro_batches
