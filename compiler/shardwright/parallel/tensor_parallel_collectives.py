"""The borders of a tensor-parallel region: the only collectives of a layer, forward and backward.

A column region is entered with a tensor that every rank has whole; its gradient is the sum of the
ranks' shares. A row region is left with a partial sum; its gradient is whole already. DeepSpeed's
own functions (module_inject/layers.py) lose the all-reduce of a non-contiguous tensor and return
their input as it is, which a model must not write into; so these are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from shardwright.parallel.tensor_parallel_rng import TENSOR_PARALLEL_RNG


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
    """The ranks' slices of the last dimension, joined; each rank's gradient is its own slice."""

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
    """A contiguous copy of x, summed over the group."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _EnteredTensor(NamedTuple):
    """versions: of both tensors; a tensor that was written into is another one."""

    group: dist.ProcessGroup
    x: torch.Tensor
    entered: torch.Tensor
    versions: tuple[int, int]


_LAST_ENTERED: list[_EnteredTensor] = []
"""The tensor that entered a region last, until its backward pass begins."""


def copy_to_tensor_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Identity forward, all-reduce of the gradient backward: one, however many modules take the
    same tensor one after another, as queries, keys and values do. Their gradients are added up
    before it."""
    if not torch.is_grad_enabled():
        return _CopyToTensorRegion.apply(x, group)
    for last in _LAST_ENTERED:
        versions = (x._version, last.entered._version)
        if last.x is x and last.group is group and last.versions == versions:
            return last.entered
    entered: torch.Tensor = _CopyToTensorRegion.apply(x, group)
    _LAST_ENTERED[:] = [_EnteredTensor(group, x, entered, (x._version, entered._version))]
    return entered


def mark_sharded_features(y: torch.Tensor) -> torch.Tensor:
    """y, features that this rank alone holds: dropout draws from the rank's own stream until a row
    region is left."""
    TENSOR_PARALLEL_RNG.enter()
    return y


def reduce_from_tensor_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce forward, identity backward."""
    TENSOR_PARALLEL_RNG.leave()
    return _ReduceFromTensorRegion.apply(x, group)


def gather_from_tensor_region(
    x: torch.Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """(..., own width) -> (..., sum of sizes) on every rank."""
    return _GatherFromTensorRegion.apply(x, sizes, group)


def slice_for_rank(
    x: torch.Tensor, pieces: tuple[tuple[int, int], ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """The rank's own (start, length) slices of a tensor that every rank has whole; the whole
    gradient backward."""
    entered = copy_to_tensor_region(x, group)
    return torch.cat([entered.narrow(-1, start, length) for start, length in pieces], dim=-1)


def all_reduce_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    """A whole parameter that each rank applies to its own heads: its gradient is the sum over the
    ranks.

    On the tensor, once per backward: a hook on the accumulated .grad would sum earlier
    micro-batches again.
    """
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: all_reduced(gradient, group))


def all_reduce_gradient_of_copies(
    parameter: torch.nn.Parameter, copies: int, group: dist.ProcessGroup
) -> None:
    """A shard that `copies` consecutive ranks hold: its gradient is the sum over these.

    One all-reduce of all shards in the tensor group, each in its own row: a group of the copies'
    own would have to be made by all ranks of the world at the same moment.
    """
    rank, shards = dist.get_rank(group), dist.get_world_size(group) // copies

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        rows = gradient.new_zeros(shards, *gradient.shape)
        rows[rank // copies] = gradient
        dist.all_reduce(rows, group=group)
        return rows[rank // copies]

    if parameter.requires_grad:
        parameter.register_hook(summed)
