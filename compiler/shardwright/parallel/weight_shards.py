"""This rank's shards of Hugging Face's parameters, read from where the weights are, by name."""

from __future__ import annotations

import torch
from torch import distributed as dist

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.parallel.weight_files import Weights
from shardwright.plan.plan import Plan


class ShardReader:
    """This rank's shards of Hugging Face's parameters, as the plan cuts them."""

    def __init__(self, plan: Plan, weights: Weights, transposed: frozenset[str]) -> None:
        self.plan, self.weights, self.transposed = plan, weights, transposed
        self.tensor_rank = plan.ranks[dist.get_rank()].tensor
        self.splits: dict[str, ParameterSharding] = {
            p.name: p for module in plan.tensor_parallel.modules for p in module.parameters
        }
        stored = set(weights.names())
        # A tied parameter may be stored under any of its names.
        self._stored_names = {name: name for name in stored} | {
            alias: next((n for n in group if n in stored), alias)
            for group in plan.model.tied
            for alias in group
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """As it is held, which is the other way round than Hugging Face has it where it is
        transposed."""
        shape = self.splits[name].shard_shape(self.tensor_rank)
        if (cut := self.plan.expert_shard_count(name)) > 1:
            shape = (shape[0] // cut, *shape[1:])
        return shape[::-1] if name in self.transposed else shape

    def read(self, name: str) -> torch.Tensor:
        """The shard in the type that the files have, as it is held."""
        split, stored = self.splits.get(name), self._stored_names[name]
        if split is None or split.dimension is None:
            values = self.weights.read(stored, None)
        else:
            cut = split.pieces(self.tensor_rank)
            parts = [
                self.weights.read(stored, (split.dimension, start, length)) for start, length in cut
            ]
            values = torch.cat(parts, dim=split.dimension)
        if (shares := self.plan.expert_shard_count(name)) > 1:
            count = values.shape[0] // shares
            values = values.narrow(
                0, self.plan.expert_rank_of(self.plan.ranks[dist.get_rank()]) * count, count
            )
        return values.t() if name in self.transposed else values

    def loses_bits(self, name: str, dtype: torch.dtype) -> bool:
        """Whether the stored values may be rounded in dtype. False for a name that is not stored,
        as an adapter's."""
        return name in self._stored_names and self.weights.may_round(
            self._stored_names[name], dtype
        )
