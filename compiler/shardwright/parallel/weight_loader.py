"""Build one rank's model: its full structure, with storage for this rank's shards.

Parameters start with one element of storage. Before a module is sharded, its parameters get memory
and this rank's slices are read into them; pages that nobody writes to stay unallocated. So the host
holds the rank's shards and the layer that is being sharded.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.models.tasks.task_registry import task_named
from shardwright.parallel.weight_files import SliceRange, Weights
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import TaskName

# Reading shards by name.


class ShardReader:
    """Read this rank's shards of Hugging Face's parameters, as the plan shards them."""

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
        """Return the shape as the model holds it, transposed where the model transposes Hugging
        Face's."""
        shape = self.splits[name].shard_shape(self.tensor_rank)
        if (cut := self.plan.expert_shard_count(name)) > 1:
            shape = (shape[0] // cut, *shape[1:])
        return shape[::-1] if name in self.transposed else shape

    def read(self, name: str) -> torch.Tensor:
        """Read the shard in the files' dtype, as the model holds it."""
        split, stored = self.splits.get(name), self._stored_names[name]
        if split is None or split.dimension is None:
            values = self.weights.read(stored, None)
        else:
            cut = split.shard_ranges(self.tensor_rank)
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
        """Return whether the stored values may be rounded in dtype; False for names that are not
        stored."""
        return name in self._stored_names and self.weights.may_round(
            self._stored_names[name], dtype
        )


_register = nn.Module.register_parameter


def _register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Move every registered parameter to the meta device; buffers are created as usual."""
    if parameter is not None and not parameter.is_meta:
        kept = parameter.__dict__
        parameter = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
        parameter.__dict__.update(kept)
    _register(module, name, parameter)


def empty_model(
    config: PretrainedConfig, attention: str | None, task: TaskName = "causal-lm"
) -> PreTrainedModel:
    """Build the fp32 model with Hugging Face's buffers and parameters that are one expanded zero.

    attention: None takes transformers' choice for the type
    """
    with patch.object(nn.Module, "register_parameter", _register_on_meta):
        model = task_named(task).build(config, attention)
    stubs: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in stubs:
                zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                stubs[id(parameter)] = nn.Parameter(zero, requires_grad=parameter.requires_grad)
            module._parameters[name] = stubs[id(parameter)]
    model.train()
    return model


class WeightLoader:
    """Allocate parameters and load this rank's slices of their values, once each."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        splits: dict[str, ParameterSharding],
        transposed: frozenset[str],
        tensor_rank: int,
        experts: Callable[[str, int], tuple[int, int] | None] = lambda name, count: None,
    ) -> None:
        """Prepare the loader.

        splits: sharding by Hugging Face name; a parameter without one is read unsharded
        experts: returns (first expert, number of experts) of a parameter that expert ranks shard,
            given its name and first dimension
        """
        self.weights, self.splits, self.transposed, self.tensor_rank = (
            weights,
            splits,
            transposed,
            tensor_rank,
        )
        self.experts = experts
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        stored = set(weights.names())
        # A tied parameter is loaded under its first name.
        self._stored_names = {
            id(p): name for name, p in reversed(self._parameters.items()) if name in stored
        }
        self._split_of = {
            id(self._parameters[n]): split for n, split in splits.items() if n in self._parameters
        }
        self._filled: set[int] = set()

    def fill(self, paths: Iterable[str]) -> None:
        """Load the parameters under these paths, each a module's or a parameter's; "" is the
        whole model."""
        wanted = tuple(paths)
        for name, parameter in self._parameters.items():
            if any(path in ("", name) or name.startswith(path + ".") for path in wanted):
                self._fill(name, parameter)

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) in self._filled:
            return
        self._filled.add(id(parameter))
        # Reserved memory costs nothing; a parameter of one element has its storage already.
        data = torch.empty(parameter.shape, dtype=parameter.dtype)
        split, stored = self._split_of.get(id(parameter)), self._stored_names[id(parameter)]
        view = data.t() if name in self.transposed else data
        own = self.experts(name, parameter.shape[0] if parameter.ndim else 0)
        view = view if own is None else view.narrow(0, *own)
        if split is None or split.dimension is None:
            view.copy_(self._read(stored, None, own))
        else:
            for start, length in split.shard_ranges(self.tensor_rank):
                piece = (split.dimension, start, length)
                view.narrow(*piece).copy_(self._read(stored, piece, own))
        parameter.data = data

    def _read(
        self, stored: str, piece: SliceRange | None, own: tuple[int, int] | None
    ) -> torch.Tensor:
        """Read a slice; own: the rank's experts, the only ones that are read."""
        if own is None:
            return self.weights.read(stored, piece)
        values = self.weights.read(stored, (0, *own))
        return values if piece is None or not values.ndim else values.narrow(*piece)


class EmptyWeights:
    """Load nothing, for a run that resumes from a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def names(self) -> Iterable[str]:
        return self._names

    def read(self, name: str, range_: Any) -> torch.Tensor:
        return torch.zeros(())

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return False


class LayerSeededWeights:
    """Initialize random weights, seeded by the name of each decoder layer or other module.

    They are equal in every layout, and no rank initializes what it does not hold. The distributions
    are the model's own `_init_weights`.
    """

    def __init__(self, model: PreTrainedModel, stack: str, seed: int) -> None:
        # Copy the structure, because modules are wrapped and parameters sharded later.
        shared: dict[int, torch.Tensor] = {id(b): b for b in model.buffers()}
        for p in model.parameters():
            shared[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        self.model, self.stack, self.seed = copy.deepcopy(model, shared), stack, seed
        self._parameters = dict(model.named_parameters())
        self._shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._drawn: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def names(self) -> Iterable[str]:
        return self._shapes

    def read(self, name: str, range_: Any) -> torch.Tensor:
        inside = name.startswith(self.stack + ".")
        layer = f"{self.stack}.{name[len(self.stack) + 1 :].split('.')[0]}"
        group = layer if inside else name.rpartition(".")[0]
        if self._drawn[0] != group:
            self._drawn = (group, self._draw(group))
        tensor = self._drawn[1][name]
        return tensor if range_ is None else tensor.narrow(*range_)

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return dtype != torch.float32

    @torch.no_grad()
    def _draw(self, group: str) -> dict[str, torch.Tensor]:
        """Copy the group's modules, give the copies storage and initialize them."""
        module = copy.deepcopy(self.model.get_submodule(group))
        for each in module.modules():
            for leaf, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[leaf] = nn.Parameter(torch.zeros(parameter.shape))
        # The innermost transformers model around the group knows how to initialize its modules.
        owner, path = self.model, group
        while path:
            path = path.rpartition(".")[0]
            around = self.model.get_submodule(path)
            if isinstance(around, PreTrainedModel):
                owner = around
                break
        torch.manual_seed(
            int.from_bytes(hashlib.sha256(f"{self.seed} {group}".encode()).digest()[:7], "big")
        )
        for each in reversed(list(module.modules())):
            owner._init_weights(each)
        return {f"{group}.{leaf}": p.detach() for leaf, p in module.named_parameters()}
