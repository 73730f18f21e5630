"""The model of one rank: its structure whole, with the storage of this rank's own slices.

The structure is built with parameters of one element of storage. Before a module is cut, its
parameters get memory and this rank's slices are read into them; pages of that memory that nobody
writes to are never there. So the host holds the rank's shard and the layer that is being cut.
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

# This rank's shards of Hugging Face's parameters, read from where the weights are, by name.


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
        """Whether the stored values may be rounded in dtype. False for a name that is not stored,
        as an adapter's."""
        return name in self._stored_names and self.weights.may_round(
            self._stored_names[name], dtype
        )


_register = nn.Module.register_parameter


def _register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Every parameter that a module registers moves to the meta device; buffers are made as
    ever."""
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
    """The whole model in fp32: buffers as Hugging Face makes them, parameters that are one zero
    each, expanded.

    attention: None takes what transformers picks for the type.
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
    """Gives parameters their memory and this rank's slices of their values, once each."""

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        splits: dict[str, ParameterSharding],
        transposed: frozenset[str],
        tensor_rank: int,
        experts: Callable[[str, int], tuple[int, int] | None] = lambda name, count: None,
    ) -> None:
        """splits: by Hugging Face name; of a parameter that is not in it the whole is read.
        experts: of a parameter that expert ranks share out, by its name and first dimension, the
        first of this rank's experts and their number.
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
        # Of a tied parameter's names the first.
        self._stored_names = {
            id(p): name for name, p in reversed(self._parameters.items()) if name in stored
        }
        self._split_of = {
            id(self._parameters[n]): split for n, split in splits.items() if n in self._parameters
        }
        self._filled: set[int] = set()

    def fill(self, paths: Iterable[str]) -> None:
        """The parameters under these paths, each a module's or a parameter's own; "" is the whole
        model."""
        wanted = tuple(paths)
        for name, parameter in self._parameters.items():
            if any(path in ("", name) or name.startswith(path + ".") for path in wanted):
                self._fill(name, parameter)

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) in self._filled:
            return
        self._filled.add(id(parameter))
        # A parameter of one element is its own stub; memory that is only reserved costs nothing.
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
        """own: experts; no others are read."""
        if own is None:
            return self.weights.read(stored, piece)
        values = self.weights.read(stored, (0, *own))
        return values if piece is None or not values.ndim else values.narrow(*piece)


class EmptyWeights:
    """For a run that resumes: everything comes out of the checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def names(self) -> Iterable[str]:
        return self._names

    def read(self, name: str, range_: Any) -> torch.Tensor:
        return torch.zeros(())

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return False


class LayerSeededWeights:
    """Random weights, seeded per decoder layer (per module outside of them) by its name: the same
    in every layout, and no rank draws what it does not hold. The distributions are the model's own
    `_init_weights`."""

    def __init__(self, model: PreTrainedModel, stack: str, seed: int) -> None:
        # The structure as it is now, around the same memory: the model's own modules are replaced
        # and wrapped later, and its parameters are cut.
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
        group = self._group(name)
        if self._drawn[0] != group:
            self._drawn = (group, self._draw(group))
        tensor = self._drawn[1][name]
        return tensor if range_ is None else tensor.narrow(*range_)

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return dtype != torch.float32

    def _group(self, name: str) -> str:
        inside = name.startswith(self.stack + ".")
        layer = f"{self.stack}.{name[len(self.stack) + 1 :].split('.')[0]}"
        return layer if inside else name.rpartition(".")[0]

    @torch.no_grad()
    def _draw(self, group: str) -> dict[str, torch.Tensor]:
        """A copy of the group's modules, of which no parameter has storage, is given some and
        drawn."""
        module = copy.deepcopy(self.model.get_submodule(group))
        for each in module.modules():
            for leaf, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[leaf] = nn.Parameter(torch.zeros(parameter.shape))
        owner = self._owner(group)
        torch.manual_seed(
            int.from_bytes(hashlib.sha256(f"{self.seed} {group}".encode()).digest()[:7], "big")
        )
        for each in reversed(list(module.modules())):
            owner._init_weights(each)
        return {f"{group}.{leaf}": p.detach() for leaf, p in module.named_parameters()}

    def _owner(self, path: str) -> PreTrainedModel:
        """The innermost transformers model around `path`: it knows how its modules are drawn."""
        while path:
            path = path.rpartition(".")[0]
            module = self.model.get_submodule(path)
            if isinstance(module, PreTrainedModel):
                return module
        return self.model
