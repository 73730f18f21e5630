"""Update matrices by Muon and the rest by AdamW, under DeepSpeed's ZeRO 0 to 3.

DeepSpeed's own Muon clips its orthogonalized update by that update's norm, and fixes the number of
Newton-Schulz steps. This one is a plain optimizer to ZeRO, after clipping: momentum is elementwise
and stays sharded. A matrix whose elements several ranks own is gathered, orthogonalized by one of
them and shared (distributed Muon, arXiv 2502.16982, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.deepspeed_groups import own_group
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.layout.zero_settings import MUON_BUCKET_NUMEL
from shardwright.parallel.newton_schulz import orthogonalized
from shardwright.plan.plan import Plan


@dataclass(slots=True)
class Matrix:
    """Locate a weight, and this rank's elements of it.

    shape: of the unsharded weight, (out, in) or (experts of this rank, out, in)
    dimension, ranges: (start, length) along the dimension that tensor ranks shard; None for a
        weight that they hold unsharded
    begin, start, numel: this rank's elements, in the master and in the flattened tensor shard
    is_local: this rank owns all elements
    owner: rank in the group that orthogonalizes the weight
    """

    name: str
    parts: tuple[int, ...]
    shape: tuple[int, ...]
    dimension: int | None
    ranges: tuple[tuple[int, int], ...]
    begin: int = 0
    start: int = 0
    numel: int = 0
    is_local: bool = True
    owner: int = 0

    @property
    def full_numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def _shard_shape(self) -> tuple[int, ...]:
        if self.dimension is None:
            return self.shape
        size = sum(length for _, length in self.ranges)
        return (*self.shape[: self.dimension], size, *self.shape[self.dimension + 1 :])

    def place(self, full: torch.Tensor, own: torch.Tensor) -> None:
        """Copy this rank's elements into the flattened weight, which is zero elsewhere."""
        if self.dimension is None:
            full.narrow(0, self.start, self.numel).copy_(own)
            return
        shard = full.new_zeros(torch.Size(self._shard_shape).numel())
        shard.narrow(0, self.start, self.numel).copy_(own)
        pieces = shard.view(self._shard_shape).split([n for _, n in self.ranges], self.dimension)
        for (first, length), piece in zip(self.ranges, pieces, strict=True):
            full.view(self.shape).narrow(self.dimension, first, length).copy_(piece)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of the flattened weight."""
        if self.dimension is not None:
            weight = full.view(self.shape)
            pieces = [weight.narrow(self.dimension, first, n) for first, n in self.ranges]
            full = torch.cat(pieces, self.dimension).view(-1)
        return full.narrow(0, self.start, self.numel)


@dataclass(slots=True)
class MasterMatrices:
    """Hold the matrices of one master and the ranks that share them.

    Every rank of the group lists the same matrices in the same order.
    """

    group: dist.ProcessGroup | None = None
    matrices: list[Matrix] = field(default_factory=list)


class MuonAdamW(torch.optim.AdamW):
    """Update groups with `use_muon` by Muon, the others by AdamW.

    A step is collective. DeepSpeed replaces the groups' parameters by flat masters; `bind` says
    which matrices these hold.
    """

    def __init__(self, plan: Plan, groups: list[dict[str, Any]]) -> None:
        optimizer = plan.optimizer
        super().__init__(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
        assert optimizer.momentum is not None and optimizer.ns_steps is not None
        self._momentum, self._steps = optimizer.momentum, optimizer.ns_steps
        is_fp32 = plan.training.precision == "fp32"
        self._dtype = torch.float32 if is_fp32 else torch.bfloat16
        self._masters: dict[torch.Tensor, MasterMatrices] = {}

    def bind(self, masters: dict[torch.Tensor, MasterMatrices]) -> None:
        self._masters = masters

    def moment_names(self, master: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a master's states, beside itself."""
        row = OPTIMIZERS["muon"]
        return row.matrix_moments if master in self._masters else row.moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for master in group["params"] if group.get("use_muon") else ():
                if master.grad is not None:
                    self._update(master, group)
        self.param_groups = [group for group in groups if not group.get("use_muon")]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, master: torch.Tensor, group: dict[str, Any]) -> None:
        """Apply momentum (Nesterov's), Newton-Schulz and decoupled weight decay."""
        state = self.state[master]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum_buffer"] = torch.zeros_like(master, requires_grad=False)
        state["step"] += 1
        update = master.grad
        assert update is not None
        state["momentum_buffer"].lerp_(update, 1 - self._momentum)
        update.lerp_(state["momentum_buffer"], self._momentum)
        held = self._masters[master]
        flat = update.view(-1)
        for matrix in held.matrices:
            if matrix.is_local and matrix.numel:
                own = flat.narrow(0, matrix.begin, matrix.numel)
                own.copy_(self._orthogonalized(matrix, own.to(self._dtype)))
        for bucket in _buckets(m for m in held.matrices if not m.is_local):
            self._update_shared(bucket, held.group, flat)
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.add_(update, alpha=-group["lr"])

    def _update_shared(
        self, bucket: list[Matrix], group: dist.ProcessGroup | None, flat: torch.Tensor
    ) -> None:
        """Gather the matrices of a bucket, orthogonalize this rank's, and gather the results.

        Where ranks hold copies, each element is summed up equally often, which the iterations do
        not see: they begin with the matrix over its norm.
        """
        buffer = flat.new_zeros(sum(m.full_numel for m in bucket), dtype=self._dtype)
        slots = buffer.split([m.full_numel for m in bucket])
        for matrix, slot in zip(bucket, slots, strict=True):
            if matrix.numel:
                matrix.place(slot, flat.narrow(0, matrix.begin, matrix.numel))
        dist.all_reduce(buffer, group=group)
        here = dist.get_rank(group=group)
        for matrix, slot in zip(bucket, slots, strict=True):
            if matrix.owner == here:
                slot.copy_(self._orthogonalized(matrix, slot))
            else:
                slot.zero_()
        dist.all_reduce(buffer, group=group)
        for matrix, slot in zip(bucket, slots, strict=True):
            if matrix.numel:
                flat.narrow(0, matrix.begin, matrix.numel).copy_(matrix.take(slot))

    def _orthogonalized(self, matrix: Matrix, values: torch.Tensor) -> torch.Tensor:
        return orthogonalized(values.view(matrix.shape), matrix.parts, self._steps).view(-1)


def _buckets(matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    bucket: list[Matrix] = []
    for matrix in matrices:
        if bucket and sum(m.full_numel for m in bucket) + matrix.full_numel > MUON_BUCKET_NUMEL:
            yield bucket
            bucket = []
        bucket.append(matrix)
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True)
class OwnedElements:
    """Locate this rank's elements of a matrix; numel 0 where it owns none."""

    master: torch.Tensor
    begin: int
    start: int
    numel: int


def bind_masters(
    plan: Plan,
    optimizer: MuonAdamW,
    held_masters: Iterable[torch.Tensor],
    owned: dict[str, OwnedElements],
    transposed: frozenset[str],
) -> None:
    """Tell the optimizer which matrices its masters hold, and which ranks share each. Collective.

    held_masters: Muon's masters, some of which may hold padding alone
    owned: this rank's elements of every matrix of its stage, in the model's order
    """
    rank = dist.get_rank()
    at = plan.ranks[rank]
    dense: dict[tuple[int, ...], list[int]] = {}
    experts: dict[tuple[int, ...], list[int]] = {}
    for r in plan.ranks:
        dense.setdefault((r.pipeline,), []).append(r.rank)
        experts.setdefault((r.pipeline, plan.expert_rank_of(r)), []).append(r.rank)
    groups = {False: own_group(dense.values())}
    groups[True] = own_group(experts.values()) if plan.strategy.expert > 1 else groups[False]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: elements.numel for name, elements in owned.items()})
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    masters = {master: MasterMatrices() for master in held_masters}
    work: dict[bool, list[int]] = {key: [0] * len(ranks) for key, (_, ranks) in groups.items()}
    for name, elements in owned.items():
        sharded = plan.expert_shard_count(name) > 1
        group, ranks = groups[sharded]
        matrix = _matrix(plan, splits[name], at.tensor, name in transposed)
        matrix.begin, matrix.start, matrix.numel = elements.begin, elements.start, elements.numel
        if not {everyone[r][name] for r in ranks} <= {0, matrix.full_numel}:
            matrix.is_local = False
            matrix.owner = work[sharded].index(min(work[sharded]))
            work[sharded][matrix.owner] += matrix.full_numel
        masters[elements.master].group = group
        masters[elements.master].matrices.append(matrix)
    optimizer.bind(masters)


def _matrix(plan: Plan, split: ParameterSharding, tensor: int, is_transposed: bool) -> Matrix:
    shape, dimension = split.shape, split.dimension
    if is_transposed:
        shape = shape[::-1]
        dimension = None if dimension is None else 1 - dimension
    shape = (shape[0] // plan.expert_shard_count(split.name), *shape[1:])
    parts = plan.muon_parts(split.name)
    assert parts is not None
    return Matrix(
        name=split.name,
        parts=parts,
        shape=shape,
        dimension=dimension,
        ranges=() if dimension is None else split.shard_ranges(tensor),
    )
