"""One module of the plan's map: its parameters cut in place, its forward made to communicate."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding, ParameterSharding
from shardwright.parallel.tensor_parallel_collectives import all_reduce_gradient_of_copies
from shardwright.parallel.tensor_parallel_styles import wrap_forward


class TensorSplitter:
    """Applies the map's modules, one by one, to a whole Hugging Face model."""

    def __init__(
        self,
        model: nn.Module,
        modules: tuple[ModuleSharding, ...],
        transposed: frozenset[str],
        group: dist.ProcessGroup,
    ) -> None:
        """transposed: weights that are held the other way round than the map has them
        (weights.conv1d_to_linear)."""
        self.model, self.transposed, self.group = model, transposed, group
        self._rank = dist.get_rank(group)
        self._listed = {split.module for split in modules}
        # By the tensor and not by its name: a tied one has several.
        self._planned = {
            id(model.get_parameter(p.name)): p for split in modules for p in split.parameters
        }
        self._owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(path)
        self._cut_already: set[int] = set()

    def split(self, split: ModuleSharding) -> None:
        """Raises RuntimeError where the result is not what the plan says: never train on a split
        nobody planned."""
        module = self.model.get_submodule(split.module)
        held = self._held(module)
        tensors = [p for p in module.parameters(recurse=False) if id(p) in self._planned]
        for parameter in tensors:
            self._cut(parameter, self._planned[id(parameter)])
        wrap_forward(self.model, split.module, split.style, held, self.group)
        for path in dict.fromkeys(p for tensor in tensors for p in self._owners[id(tensor)]):
            other = self.model.get_submodule(path)
            if path not in self._listed and type(other) is type(
                module
            ):  # a twin with the same, cut, tensor
                wrap_forward(self.model, path, split.style, self._held(other), self.group)
        for planned in split.parameters:
            self._check(self.model.get_parameter(planned.name), planned)

    def _held(self, module: nn.Module) -> dict[str, ParameterSharding]:
        """The module's own parameters: leaf name -> split."""
        own = module.named_parameters(recurse=False)
        return {leaf: self._planned[id(p)] for leaf, p in own if id(p) in self._planned}

    def _cut(self, parameter: nn.Parameter, planned: ParameterSharding) -> None:
        if planned.dimension is None or id(parameter) in self._cut_already:
            return
        self._cut_already.add(id(parameter))
        dimension = 1 - planned.dimension if planned.name in self.transposed else planned.dimension
        parts = [
            parameter.data.narrow(dimension, start, length)
            for start, length in planned.pieces(self._rank)
        ]
        parameter.data = torch.cat(parts, dim=dimension).contiguous()
        # Megatron's mark, which DeepSpeed reads: the gradient norm counts what carries it on every
        # rank, and all else on the first. Copies of a shard count once.
        setattr(parameter, "tensor_model_parallel", self._rank % planned.copies == 0)  # noqa: B010
        if planned.copies > 1:
            all_reduce_gradient_of_copies(parameter, planned.copies, self.group)

    def _check(self, parameter: nn.Parameter, planned: ParameterSharding) -> None:
        shape, got = planned.shard_shape(self._rank), tuple(parameter.shape)
        if got != (shape[::-1] if planned.name in self.transposed else shape):
            raise RuntimeError(
                f"{planned.name} is {got} on tensor rank {self._rank}, the plan says {shape}"
            )
        counted = planned.dimension is not None and self._rank % planned.copies == 0
        if bool(getattr(parameter, "tensor_model_parallel", False)) != counted:
            raise RuntimeError(f"{planned.name} would be counted wrongly in the gradient norm")
