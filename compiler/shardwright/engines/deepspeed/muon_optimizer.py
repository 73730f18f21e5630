"""Update matrices by Muon and the rest by AdamW, under DeepSpeed's ZeRO 0 to 3.

DeepSpeed's own Muon clips its orthogonalized update by that update's norm, and fixes the number of
Newton-Schulz steps. This one is a plain optimizer to ZeRO, after clipping: momentum is elementwise
and stays sharded. A matrix whose elements several ranks own is gathered, orthogonalized by one of
them and shared (distributed Muon, arXiv 2502.16982, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.weight_shards import (
    MastersGroups,
    OwnedElements,
    WeightShard,
    locate,
    numel_on_every_rank,
    sharing_ranks,
)
from shardwright.engines.trainer_protocol import OwnedShard
from shardwright.layout.fused_weights import JoinedMatrices
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.zero_settings import MUON_BUCKET_NUMEL
from shardwright.parallel.newton_schulz import orthogonalized
from shardwright.plan.plan import Plan


@dataclass(slots=True)
class Matrix:
    """Hold a weight's place, and who orthogonalizes it.

    joined: the matrices that the weight joins
    is_local: one rank owns all elements
    owner: rank in the group that orthogonalizes the weight
    """

    shard: WeightShard
    joined: JoinedMatrices
    is_local: bool = True
    owner: int = 0

    @property
    def full_numel(self) -> int:
        return self.shard.full_numel


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
        self._plan = plan
        self._masters: dict[torch.Tensor, MasterMatrices] = {}

    def takes(self, name: str) -> bool:
        return self._plan.muon_matrices(name) is not None

    def element_states(self, name: str) -> dict[str, torch.Tensor]:
        return {}

    def state_shards(self, plan: Plan, copied: frozenset[str]) -> Iterator[OwnedShard]:
        return iter(())

    def bind(
        self,
        plan: Plan,
        masters: MastersGroups,
        owned: Mapping[str, OwnedElements],
        transposed: frozenset[str],
    ) -> None:
        """Take the matrices that the masters hold, and which ranks share each. Collective."""
        sharing, everyone = sharing_ranks(plan), numel_on_every_rank(owned)
        mine = (master for master, group in masters.items() if group.get("use_muon"))
        self._masters = {master: MasterMatrices() for master in mine}
        work = {key: [0] * len(among.ranks) for key, among in sharing.items()}
        for shard in locate(plan, owned, transposed):
            name, sharded = shard.name, plan.expert_shard_count(shard.name) > 1
            joined = plan.muon_matrices(name)
            assert joined is not None
            matrix = Matrix(shard, joined)
            if not {everyone[r][name] for r in sharing[sharded].ranks} <= {0, shard.full_numel}:
                matrix.is_local = False
                matrix.owner = work[sharded].index(min(work[sharded]))
                work[sharded][matrix.owner] += shard.full_numel
            held = self._masters[owned[name].master]
            held.group = sharing[sharded].group
            held.matrices.append(matrix)

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
            if matrix.is_local and matrix.shard.numel:
                own = matrix.shard.own(flat)
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
            if matrix.shard.numel:
                matrix.shard.place(slot, matrix.shard.own(flat))
        dist.all_reduce(buffer, group=group)
        here = dist.get_rank(group=group)
        for matrix, slot in zip(bucket, slots, strict=True):
            if matrix.owner == here:
                slot.copy_(self._orthogonalized(matrix, slot))
            else:
                slot.zero_()
        dist.all_reduce(buffer, group=group)
        for matrix, slot in zip(bucket, slots, strict=True):
            if matrix.shard.numel:
                matrix.shard.own(flat).copy_(matrix.shard.take(slot))

    def _orthogonalized(self, matrix: Matrix, values: torch.Tensor) -> torch.Tensor:
        return orthogonalized(values.view(matrix.shard.shape), matrix.joined, self._steps).view(-1)


def _buckets(matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    bucket: list[Matrix] = []
    for matrix in matrices:
        if bucket and sum(m.full_numel for m in bucket) + matrix.full_numel > MUON_BUCKET_NUMEL:
            yield bucket
            bucket = []
        bucket.append(matrix)
    if bucket:
        yield bucket
