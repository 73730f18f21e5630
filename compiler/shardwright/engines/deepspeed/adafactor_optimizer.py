"""Update weights by Adafactor (arXiv 1804.04235) under DeepSpeed's ZeRO 0 to 3.

The second moment of a matrix is held as the means of its rows and of its columns. A rank adds up
the squares of the elements that it owns, and the ranks that share a weight sum what they found: a
row and a column, not the matrix. The update is torch.optim.Adafactor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.weight_shards import (
    FlatMastersOptimizer,
    MastersGroups,
    OwnedElements,
    SharingRanks,
    WeightShard,
    locate,
    numel_on_every_rank,
    sharing_ranks,
)
from shardwright.engines.trainer_protocol import OwnedShard, state_name
from shardwright.plan.plan import Plan


@dataclass(slots=True)
class FactoredWeight:
    """Hold a weight's place and its second moment, by torch.optim.Adafactor's names.

    copies, copies_in_stage: how often its elements are in its group of ranks, and in the stage with
        all experts
    numel: elements of the weight, all experts included
    states: row_var and col_var of the unsharded weight with its last dimensions (rows, 1) and
        (1, columns); variance of this rank's elements of a vector
    """

    shard: WeightShard
    is_expert: bool
    copies: int
    copies_in_stage: int
    numel: int
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_factored(self) -> bool:
        return len(self.shard.shape) >= 2

    def block(self, own: torch.Tensor) -> tuple[slice, int, torch.Tensor]:
        """Return this rank's elements among zeros in the rows, or experts, that they touch.

        Returns (rows or experts of the tensor shard, elements before the first, block).
        """
        shape = self.shard.shard_shape
        unit = torch.Size(shape[1:]).numel()
        first, last = self.shard.start // unit, -(-(self.shard.start + self.shard.numel) // unit)
        before = self.shard.start - first * unit
        size = (last - first) * unit
        if own.numel() < size:
            padded = own.new_zeros(size)
            padded.narrow(0, before, own.numel()).copy_(own)
            own = padded
        return slice(first, last), before, own.view(last - first, *shape[1:])

    def add_squares(self, own: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Add the sums of the squares in each row and column to those of the unsharded weight."""
        touched, _, block = self.block(own)
        squares = block.square()
        shape = self.shard.shard_shape
        of_rows = rows.new_zeros((*shape[:-1], 1))
        of_columns = columns.new_zeros((*shape[:-2], 1, shape[-1]))
        of_rows[touched] += squares.sum(-1, keepdim=True)
        (of_columns if len(shape) == 2 else of_columns[touched]).add_(squares.sum(-2, keepdim=True))
        self.shard.add_shard(rows, of_rows)
        self.shard.add_shard(columns, of_columns)

    def divide_by_root(self, own: torch.Tensor, eps: float) -> None:
        """Divide this rank's elements by the root of the second moment, in place."""
        if not self.is_factored:
            own.mul_(self.states["variance"].clamp(min=eps * eps).rsqrt_())
            return
        touched, before, block = self.block(own)
        row_var, col_var = self.states["row_var"], self.states["col_var"]
        row_var = row_var / row_var.mean(dim=-2, keepdim=True).clamp_(min=eps)
        rows, columns = self.shard.shard_of(row_var)[touched], self.shard.shard_of(col_var)
        root = rows * (columns if block.ndim == 2 else columns[touched])
        update = root.clamp_(min=eps * eps).rsqrt_().mul_(block)
        own.copy_(update.view(-1).narrow(0, before, own.numel()))


class ShardedAdafactor(FlatMastersOptimizer[FactoredWeight]):
    """Update the weights in flat masters."""

    def bind(
        self,
        plan: Plan,
        masters: MastersGroups,
        owned: Mapping[str, OwnedElements],
        transposed: frozenset[str],
    ) -> None:
        self._sharing, everyone = sharing_ranks(plan), numel_on_every_rank(owned)
        self._held = {master: [] for master in masters}
        for shard in locate(plan, owned, transposed):
            experts = plan.expert_shard_count(shard.name)
            master = owned[shard.name].master
            numel = shard.full_numel * experts

            def held(is_expert: bool, name: str = shard.name) -> int:
                return sum(everyone[r][name] for r in self._sharing[is_expert].ranks)

            weight = FactoredWeight(
                shard=shard,
                is_expert=experts > 1,
                copies=held(experts > 1) // shard.full_numel,
                copies_in_stage=held(False) // numel,
                numel=numel,
            )
            if weight.is_factored:
                rows, columns = (*shard.shape[:-1], 1), (*shard.shape[:-2], 1, shard.shape[-1])
                weight.states["row_var"] = master.new_zeros(rows, requires_grad=False)
                weight.states["col_var"] = master.new_zeros(columns, requires_grad=False)
            else:
                weight.states["variance"] = master.new_zeros(shard.numel, requires_grad=False)
            self.weights[shard.name] = weight
            self._held[master].append(weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters in `param_groups`, of which DeepSpeed's engines leave one at a
        time."""
        keys = self._keys
        assert keys.beta2_decay is not None and keys.scale_eps is not None
        assert keys.clip_threshold is not None
        groups = {p: g for g in self.param_groups for p in g["params"] if p in self._held}
        weights = [(master, w) for master in groups for w in self._held[master]]
        if not weights:
            return
        count = self._count_update(groups)
        squared_weights = self._sums_of_squares(weights, lambda master: master)
        self._update_moments(weights, float(count) ** keys.beta2_decay)
        for master, weight in _owned(weights):
            weight.divide_by_root(weight.shard.own(_gradient(master)), keys.eps)
        squared_updates = self._sums_of_squares(weights, _gradient)
        for at, (master, weight) in enumerate(weights):
            if not weight.shard.numel or master.grad is None:
                continue
            rate, flat = groups[master]["lr"], master.view(-1)
            own, update = weight.shard.own(flat), weight.shard.own(_gradient(master))
            step = torch.as_tensor(rate, device=own.device)
            if keys.scale_parameter:
                scale = (squared_weights[at] / weight.numel).sqrt_().clamp_(min=keys.scale_eps)
                step = scale * min(rate, count**-0.5)
            rms = (squared_updates[at] / weight.numel).sqrt_()
            own.mul_(1 - rate * groups[master]["weight_decay"])
            own.sub_(update.mul_(step / (rms / keys.clip_threshold).clamp_(min=1.0)))

    def element_states(self, name: str) -> dict[str, torch.Tensor]:
        states = self.weights[name].states
        return {"variance": states["variance"]} if "variance" in states else {}

    def state_shards(self, plan: Plan, copied: frozenset[str]) -> Iterator[OwnedShard]:
        """Yield the factors of each matrix, which every rank that shares it holds; the first one
        saves them."""
        for name, weight in self.weights.items():
            writer = self._sharing[weight.is_expert].ranks[0]
            for factor in _FACTORS if weight.is_factored else ():
                values = weight.states[factor].view(-1)
                yield OwnedShard(
                    name=state_name(name, factor),
                    shard_shape=tuple(weight.states[factor].shape),
                    start=0,
                    states={"value": values},
                    live=values,
                    partitioned=True,
                    copied=name in copied or dist.get_rank() != writer,
                )

    def _sums_of_squares(
        self, weights: HeldWeights, values: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the sum of squares over each weight, all experts included.

        values: returns what is summed of a master's elements
        """
        found = torch.zeros(len(weights), device=weights[0][0].device)
        for at, (master, weight) in enumerate(weights):
            if weight.shard.numel and master.grad is not None:
                own = weight.shard.own(values(master).view(-1))
                found[at] = own.square().sum() / weight.copies_in_stage
        self._sharing[False].sum(found)
        return found

    def _update_moments(self, weights: HeldWeights, share: float) -> None:
        """Blend this update's squares into the second moments, by `share`."""
        for master, weight in _owned(weights):
            if not weight.is_factored:
                own = weight.shard.own(_gradient(master))
                weight.states["variance"].lerp_(own * own, share)
        for is_expert, sharing in self._sharing.items():
            factored = [(m, w) for m, w in weights if w.is_factored and w.is_expert == is_expert]
            if factored:
                self._update_factors(factored, sharing, share)

    def _update_factors(self, weights: HeldWeights, sharing: SharingRanks, share: float) -> None:
        sizes = [weight.states[factor].numel() for _, weight in weights for factor in _FACTORS]
        sums = torch.zeros(sum(sizes), device=weights[0][0].device)
        parts = iter(sums.split(sizes))
        found = [
            [next(parts).view_as(weight.states[factor]) for factor in _FACTORS]
            for _, weight in weights
        ]
        for (master, weight), factors in zip(weights, found, strict=True):
            if weight.shard.numel and master.grad is not None:
                weight.add_squares(weight.shard.own(_gradient(master)), *factors)
        sharing.sum(sums)
        for (_, weight), factors in zip(weights, found, strict=True):
            for factor, summed, squares in zip(_FACTORS, (-1, -2), factors, strict=True):
                mean = squares.div_(weight.copies * weight.shard.shape[summed])
                weight.states[factor].lerp_(mean, share)


HeldWeights = list[tuple[torch.Tensor, FactoredWeight]]
"""Masters and the weights in them, the same on every rank that shares them."""
_FACTORS = ("row_var", "col_var")


def _owned(weights: HeldWeights) -> Iterator[tuple[torch.Tensor, FactoredWeight]]:
    """Yield those of which this rank has elements, and gradients."""
    return ((m, w) for m, w in weights if w.shard.numel and m.grad is not None)


def _gradient(master: torch.Tensor) -> torch.Tensor:
    assert master.grad is not None
    return master.grad.view(-1)
