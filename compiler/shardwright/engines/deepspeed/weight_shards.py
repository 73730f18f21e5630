"""Locate the elements of each weight that a rank's flat masters hold, and the ranks that share it.

ZeRO gives an optimizer flat fp32 masters. One that needs more of a weight than single elements asks
here where they belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.deepspeed_groups import own_group
from shardwright.engines.trainer_protocol import OwnedShard
from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class OwnedElements:
    """Locate this rank's elements of a weight; numel 0 where it owns none.

    begin, start: in the master and in the flattened tensor shard
    shard_shape: of the tensor shard
    """

    master: torch.Tensor
    begin: int
    start: int
    numel: int
    shard_shape: tuple[int, ...]


@dataclass(slots=True)
class WeightShard:
    """Locate a weight, and this rank's elements of it.

    shape: of the unsharded weight, (out, in) or (experts of this rank, out, in)
    dimension, ranges: (start, length) along the dimension that tensor ranks shard; None for a
        weight that they hold unsharded
    begin, start, numel: this rank's elements, in the master and in the flattened tensor shard
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    ranges: tuple[tuple[int, int], ...]
    begin: int
    start: int
    numel: int

    @property
    def full_numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def shard_shape(self) -> tuple[int, ...]:
        if self.dimension is None:
            return self.shape
        size = sum(length for _, length in self.ranges)
        return (*self.shape[: self.dimension], size, *self.shape[self.dimension + 1 :])

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor that is like the flattened master."""
        return flat.narrow(0, self.begin, self.numel)

    def shard_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return the tensor rank's part of a tensor of the unsharded weight's dimensions.

        A size of 1 in the sharded dimension stands for all.
        """
        if self.dimension is None or unsharded.size(self.dimension) == 1:
            return unsharded
        pieces = [unsharded.narrow(self.dimension, first, n) for first, n in self.ranges]
        return torch.cat(pieces, self.dimension)

    def add_shard(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        """Add a tensor rank's part to its place in a tensor of the unsharded weight's
        dimensions."""
        if self.dimension is None or unsharded.size(self.dimension) == 1:
            unsharded.add_(shard)
            return
        pieces = shard.split([n for _, n in self.ranges], self.dimension)
        for (first, length), piece in zip(self.ranges, pieces, strict=True):
            unsharded.narrow(self.dimension, first, length).add_(piece)

    def place(self, full: torch.Tensor, own: torch.Tensor) -> None:
        """Copy this rank's elements into the flattened weight, which is zero elsewhere."""
        if self.dimension is None:
            full.narrow(0, self.start, self.numel).copy_(own)
            return
        shard = full.new_zeros(torch.Size(self.shard_shape).numel())
        shard.narrow(0, self.start, self.numel).copy_(own)
        self.add_shard(full.view(self.shape), shard.view(self.shard_shape))

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of the flattened weight."""
        flat = self.shard_of(full.view(self.shape)).reshape(-1)
        return flat.narrow(0, self.start, self.numel)


MastersGroups = Mapping[torch.Tensor, Mapping[str, Any]]
"""Maps each flat master to its parameter group."""


@runtime_checkable
class WeightOptimizer(Protocol):
    """Update weights, of which an element's update needs more than that element."""

    def takes(self, name: str) -> bool:
        """Return whether `bind` needs to know a weight."""
        ...

    def bind(
        self,
        plan: Plan,
        masters: MastersGroups,
        owned: Mapping[str, OwnedElements],
        transposed: frozenset[str],
    ) -> None:
        """Take the weights that the masters hold. Collective.

        masters: some may hold padding alone
        owned: this rank's elements of every weight of its stage, in the model's order
        """
        ...

    def element_states(self, name: str) -> dict[str, torch.Tensor]:
        """Return the states of a weight's elements on this rank, beside those of its master."""
        ...

    def state_shards(self, plan: Plan, copied: frozenset[str]) -> Iterator[OwnedShard]:
        """Yield the states that are not like their weight, by `state_name`.

        copied: weights that an earlier stage saves
        """
        ...


Held = TypeVar("Held")


class FlatMastersOptimizer(torch.optim.Optimizer, Generic[Held]):
    """Begin an optimizer of weights in flat masters, whose step is collective.

    DeepSpeed replaces the groups' parameters by flat masters; `bind` says which weights these hold.
    A master's state is its count of updates; the weights' states are in `weights`.
    """

    def __init__(self, plan: Plan, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": plan.optimizer.lr, "weight_decay": 0.0})
        self._keys = plan.optimizer
        self.weights: dict[str, Held] = {}
        self._sharing: dict[bool, SharingRanks] = {}
        self._held: dict[torch.Tensor, list[Held]] = {}

    def moment_names(self, master: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a master's states that are like it: none."""
        return ()

    def takes(self, name: str) -> bool:
        return True

    def _count_update(self, masters: Iterable[torch.Tensor]) -> int:
        """Count an update in the state of each master, and return its number."""
        count = 0
        for master in masters:
            state = self.state[master]
            state["step"] = count = int(state.get("step", 0)) + 1
            if master.grad is not None:
                master.grad = master.grad.contiguous()
        return count


def locate(
    plan: Plan, owned: Mapping[str, OwnedElements], transposed: frozenset[str]
) -> list[WeightShard]:
    """Return where this rank's elements of each weight are.

    owned: this rank's elements of every weight of its stage, in the model's order
    """
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    tensor, found = plan.ranks[dist.get_rank()].tensor, []
    for name, elements in owned.items():
        split = splits.get(name)
        shape, dimension = elements.shard_shape, None
        if split is not None and split.dimension is not None:
            shape, dimension = split.shape, split.dimension
            if name in transposed:
                shape, dimension = shape[::-1], 1 - dimension
            shape = (shape[0] // plan.expert_shard_count(name), *shape[1:])
        found.append(
            WeightShard(
                name,
                shape,
                dimension,
                () if split is None or dimension is None else split.shard_ranges(tensor),
                elements.begin,
                elements.start,
                elements.numel,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """Hold the ranks among which a weight's elements are, as their group and their numbers."""

    group: dist.ProcessGroup
    ranks: list[int]

    def sum(self, values: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place. Collective."""
        if len(self.ranks) > 1:
            dist.all_reduce(values, group=self.group)


def sharing_ranks(plan: Plan, *, same_tensor_rank: bool = False) -> dict[bool, SharingRanks]:
    """Build the groups of ranks that share weights: False of a stage, True of its experts of one
    expert rank. Collective.

    same_tensor_rank: those that share a tensor shard
    """
    dense: dict[tuple[int, ...], list[int]] = {}
    experts: dict[tuple[int, ...], list[int]] = {}
    for r in plan.ranks:
        place = (r.pipeline, r.tensor if same_tensor_rank else 0)
        dense.setdefault(place, []).append(r.rank)
        experts.setdefault((*place, plan.expert_rank_of(r)), []).append(r.rank)
    found = {False: SharingRanks(*own_group(dense.values()))}
    is_split = plan.strategy.expert > 1
    found[True] = SharingRanks(*own_group(experts.values())) if is_split else found[False]
    return found


def numel_on_every_rank(owned: Mapping[str, OwnedElements]) -> list[dict[str, int]]:
    """Return each rank's elements of each weight of its stage. Collective."""
    everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: elements.numel for name, elements in owned.items()})
    return everyone
