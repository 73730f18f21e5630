"""Shard modules of experts in place; their class and forward stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding
from shardwright.models.mixture_of_experts import (
    Experts,
    RouterAuxLoss,
    call_positionally,
    number_of_experts,
)
from shardwright.plan.plan import Plan, PlanRank

# Token dispatch: hidden states go to the ranks of their experts, and outputs return. T: tokens of
# this rank, k: chosen experts of each, H: hidden size, E: experts, e: expert ranks, R: rows that
# this rank receives. No token is dropped, so the routers decide R.


def dispatch_tokens(inner: Experts, experts: int, group: dist.ProcessGroup) -> Experts:
    """Wrap a forward of local experts, numbered from zero, with token dispatch and combine.

    Rank r of the group holds experts [r E/e, (r + 1) E/e). The routing weights are applied on the
    token's rank, where their gradients are needed.
    """
    ranks = dist.get_world_size(group)
    local = experts // ranks

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(chosen.reshape(-1), stable=True)
        tokens = order // chosen.shape[-1]
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)
        arriving = torch.empty_like(counts)  # (e, E/e): counts by sender and local expert
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (c.view(ranks, local).sum(dim=1).tolist() for c in (counts, arriving))
        rows = token_all_to_all(hidden[tokens], sent, received, group)
        numbers = (
            torch.arange(local, device=chosen.device).repeat(ranks).repeat_interleave(arriving)
        )
        numbers = numbers.to(chosen.dtype)
        arrived = len(rows)
        if not arrived:
            # A dummy row: other ranks wait in the backward pass, and every parameter needs a
            # gradient. Joined, so that the exchange of the empty rows has its backward pass.
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            numbers = numbers.new_zeros(1)
        made = inner(rows, numbers[:, None], weights.new_ones(len(numbers), 1))[:arrived]
        made = token_all_to_all(made, received, sent, group)
        made = (made * weights.reshape(-1)[order, None]).to(hidden.dtype)
        return torch.zeros_like(hidden).index_add(0, tokens, made)

    return forward


def token_all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows (sum of sent, H), ordered by target, for (sum of received, H), ordered by
    source.

    Collective, also in the backward pass.
    """
    exchange: Callable[..., torch.Tensor] = _TokenAllToAll.apply
    return exchange(rows, sent, received, group)


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


# The routers' balance loss, for any engine.


def router_balance(
    plan: Plan, model: nn.Module, group: dist.ProcessGroup | None = None
) -> RouterAuxLoss | None:
    """Return the routers' balance loss.

    model: the unsplit model
    group: the context ranks of this rank's sequences, or None
    """
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
    """Return the weight that undoes the engine's mean over micro-batches and data x context
    ranks."""
    return plan.strategy.context / micro_batches


class ExpertSharder:
    """Shard the experts of one model as its layers are built, before any of them has run.

    A gradient accumulator keeps the shape that its parameter had first.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Iterable[str] = (),
        group: dist.ProcessGroup | None = None,
        mark: Callable[[nn.Parameter], None] = lambda parameter: None,
    ) -> None:
        """Take the modules of experts at `paths`, sharded over the group's ranks in its order.

        mark: sets what an engine must know of a sharded parameter
        """
        self.model, self.paths, self.group, self.mark = model, tuple(paths), group, mark
        self._experts: dict[str, int] = {}

    def inside(self, layer: str) -> list[str]:
        """Return the paths of a layer's modules of experts."""
        return [path for path in self.paths if path.startswith(layer + ".")]

    def cut(self, layer: str) -> None:
        """Shard the layer's experts, which are unsharded until then."""
        for path in self.inside(layer):
            assert self.group is not None
            module = self.model.get_submodule(path)
            self._experts[path] = cut_experts(
                module, dist.get_rank(self.group), dist.get_world_size(self.group)
            )
            for parameter in module.parameters(recurse=False):
                self.mark(parameter)

    def dispatch(self, layer: str) -> None:
        """Wrap the layer's experts with token dispatch, around any tensor parallelism inside an
        expert.

        Their forward and backward passes are collective from then on.
        """
        for path in self.inside(layer):
            assert self.group is not None
            module: Any = self.model.get_submodule(path)
            module.forward = call_positionally(
                dispatch_tokens(module.forward, self._experts[path], self.group)
            )


def local_expert_range(
    plan: Plan, rank: PlanRank, parameter: str, experts: int
) -> tuple[int, int] | None:
    """Return (first expert, number of experts) of a rank; None for a parameter that is not
    sharded."""
    ranks = plan.expert_shard_count(parameter)
    return None if ranks == 1 else (plan.expert_rank_of(rank) * experts // ranks, experts // ranks)


def splits_of_local_experts(plan: Plan) -> tuple[ModuleSharding, ...]:
    """Return the plan's map with the shapes of this rank's experts."""
    splits = []
    for module in plan.tensor_parallel.modules:
        if module.module in plan.experts:
            own = (
                replace(p, shape=(p.shape[0] // plan.strategy.expert, *p.shape[1:]))
                for p in module.parameters
            )
            module = replace(module, parameters=tuple(own))
        splits.append(module)
    return tuple(splits)


def cut_experts(module: Any, rank: int, ranks: int) -> int:
    """Shard a module's experts and return their full number; a parameter on the meta device
    stays there."""
    experts = number_of_experts(module)
    if not experts or experts % ranks:
        raise RuntimeError(
            f"{type(module).__name__}: {experts} experts do not divide over {ranks} ranks"
        )
    local = experts // ranks
    for parameter in module.parameters(recurse=False):
        part = parameter.data.narrow(0, rank * local, local)
        parameter.data = part if part.stride(0) == 0 else part.clone()
    module.num_experts = local
    return experts
