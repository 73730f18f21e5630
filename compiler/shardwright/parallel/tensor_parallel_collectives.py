"""Run the collectives at the borders of a tensor-parallel region, forward and backward.

A column region is entered with a replicated tensor, whose gradient is the sum of the ranks' shares.
A row region is left with a partial sum, whose gradient is replicated already. DeepSpeed's own
functions (module_inject/layers.py) lose the all-reduce of a non-contiguous tensor, and return their
input itself, which a model must not write into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed as dist

from shardwright.plan.plan import Plan

# Random numbers under tensor parallelism. Tensor ranks share the seed, so dropout on a replicated
# tensor drops the same elements everywhere. Between a column-parallel layer and the next
# row-parallel one, a rank has features of its own. It then draws from a stream seeded by one number
# of the shared stream and its tensor rank. This stream ends with the region, so recomputation and
# resume, which restore the shared stream, reproduce it.


class TensorParallelRng:
    """Switch the default generators between the shared stream and the rank's own; one a process."""

    def __init__(self) -> None:
        self._tensor_rank: int | None = None
        self._shared: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def use(self, tensor_rank: int | None) -> None:
        """Switch the own streams on for a tensor rank; None (the default) switches them off."""
        self._tensor_rank, self._shared = tensor_rank, None

    def enter(self) -> None:
        """Start the rank's own stream after a column-parallel layer; a second one changes nothing.

        An evaluation has no dropout and must draw nothing, because later steps would draw other
        numbers.
        """
        if self._tensor_rank is None or self._shared is not None or not torch.is_grad_enabled():
            return
        seed = int(torch.randint(2**62, ()))
        on_gpu = torch.cuda.is_available()
        self._shared = (torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None)
        torch.manual_seed(seed + self._tensor_rank)

    def leave(self) -> None:
        """Return to the shared stream at a row-parallel layer."""
        if self._shared is None:
            return
        cpu, gpu = self._shared
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        self._shared = None

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Recompute from outside any region; recomputation may stop inside one."""
        before, self._shared = self._shared, None
        try:
            yield
        finally:
            self._shared = before


TENSOR_PARALLEL_RNG = TensorParallelRng()


def seed_dropout(plan: Plan, rank: int) -> None:
    """Seed dropout: data ranks and stages differ, tensor ranks of one model copy share the seed."""
    at = plan.ranks[rank]
    shards = plan.strategy.zero_world_size
    torch.manual_seed(
        plan.training.seed + 1 + at.pipeline * shards + at.data * plan.strategy.context + at.context
    )


class _CopyToTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _LAST_ENTERED.clear()
        return all_reduced(gradient, ctx.group), None


class _ReduceFromTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFromTensorRegion(torch.autograd.Function):
    """Concatenate the ranks' slices of the last dimension; each rank's gradient is its own
    slice."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        widest = max(sizes)
        own = x.new_zeros(*x.shape[:-1], widest)
        own[..., : x.shape[-1]] = x
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=group)
        return torch.cat(
            [part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.split(ctx.sizes, dim=-1)[ctx.rank].contiguous(), None, None


def all_reduced(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a contiguous copy of x, summed over the group."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _EnteredTensor(NamedTuple):
    """Hold a tensor that entered a region; versions tell whether either tensor was written into."""

    group: dist.ProcessGroup
    x: torch.Tensor
    entered: torch.Tensor
    versions: tuple[int, int]


_LAST_ENTERED: list[_EnteredTensor] = []
"""Holds the tensor that entered a region last, until its backward pass begins."""


def copy_to_tensor_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x unchanged; all-reduce its gradient in the backward pass.

    Modules that take the same tensor in turn, as queries, keys and values do, add up their
    gradients and share one all-reduce.
    """
    enter: Callable[..., torch.Tensor] = _CopyToTensorRegion.apply
    if not torch.is_grad_enabled():
        return enter(x, group)
    for last in _LAST_ENTERED:
        versions = (x._version, last.entered._version)
        if last.x is x and last.group is group and last.versions == versions:
            return last.entered
    entered = enter(x, group)
    _LAST_ENTERED[:] = [_EnteredTensor(group, x, entered, (x._version, entered._version))]
    return entered


def mark_sharded_features(y: torch.Tensor) -> torch.Tensor:
    """Return y, features of this rank alone; dropout draws from the rank's own stream until a
    row region."""
    TENSOR_PARALLEL_RNG.enter()
    return y


def reduce_from_tensor_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce forward; pass the gradient unchanged backward."""
    TENSOR_PARALLEL_RNG.leave()
    reduce: Callable[..., torch.Tensor] = _ReduceFromTensorRegion.apply
    return reduce(x, group)


def gather_from_tensor_region(
    x: torch.Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """Gather (..., own width) to (..., sum of sizes) on every rank."""
    gather: Callable[..., torch.Tensor] = _GatherFromTensorRegion.apply
    return gather(x, sizes, group)


def slice_for_rank(
    x: torch.Tensor, pieces: tuple[tuple[int, int], ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """Take the rank's own (start, length) slices of a replicated tensor; all-gather the gradient
    backward."""
    entered = copy_to_tensor_region(x, group)
    return torch.cat([entered.narrow(-1, start, length) for start, length in pieces], dim=-1)


def all_reduce_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a replicated parameter that each rank applies to its own heads.

    A tensor hook runs once per backward pass; a hook on the accumulated .grad would sum earlier
    micro-batches again.
    """
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: all_reduced(gradient, group))


def all_reduce_gradient_of_copies(
    parameter: torch.nn.Parameter, copies: int, group: dist.ProcessGroup
) -> None:
    """Sum the gradient of a shard over the `copies` consecutive ranks that hold it.

    One all-reduce in the tensor group carries all shards, each in a row of its own. A process group
    of the copies would need all ranks of the world to create it.
    """
    rank, shards = dist.get_rank(group), dist.get_world_size(group) // copies

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        rows = gradient.new_zeros(shards, *gradient.shape)
        rows[rank // copies] = gradient
        dist.all_reduce(rows, group=group)
        return rows[rank // copies]

    if parameter.requires_grad:
        parameter.register_hook(summed)


# Cross-entropy over a vocabulary that is sharded over the tensor ranks.


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
        )  # 0 on ranks without the target's logit
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
    """Return fp32 losses (...) of logits (..., V of this rank) and target ids (...), 0 where
    `ignored`.

    The gradient has the logits' dtype.

    first: the vocabulary id of this rank's first logit
    """
    cross_entropy: Callable[..., torch.Tensor] = _CrossEntropy.apply
    return cross_entropy(logits, target, first, ignored, group)


@torch.no_grad()
def top_log_probabilities(
    logits: torch.Tensor, k: int, *, first: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return fp32 (..., 1 + 2 k) of logits (..., V of this rank): their normalizer over the whole
    vocabulary, then the ids of the k largest and their log-probabilities, the largest first.

    Equal logits are ordered by their ids. fp32 holds an id exactly up to 2^24.

    first: the vocabulary id of this rank's first logit
    group: None for an unsharded vocabulary
    """
    logits = logits.float()
    highest = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = (logits - highest.unsqueeze(-1)).exp_().sum(dim=-1)
    values, places = logits.topk(min(k, logits.shape[-1]), dim=-1)
    ids = (places + first).float()
    if group is not None:
        dist.all_reduce(sums, group=group)
        missing = (0, k - values.shape[-1])  # a shard may have fewer than k
        own = torch.stack([F.pad(values, missing, value=-torch.inf), F.pad(ids, missing)])
        shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, own.contiguous(), group=group)
        values, ids = torch.cat(shards, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    logarithm = sums.log().unsqueeze(-1)
    highest = highest.unsqueeze(-1)
    largest = (values[..., :k] - highest) - logarithm
    return torch.cat([highest + logarithm, ids.gather(-1, order)[..., :k], largest], dim=-1)
