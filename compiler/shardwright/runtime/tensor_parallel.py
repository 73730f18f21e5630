"""Tensor parallelism: the plan's map, applied with DeepSpeed's own parallel layers. One mechanism for both engines.

Two collectives of DeepSpeed's layers are lost for non-contiguous tensors (module_inject/layers.py: RowParallel.forward
and ColumnParallel.backward reduce `x.contiguous()`, a copy, and return `x`), so the tensors are made contiguous here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.module_inject import layers as ds_layers
from torch import nn

from shardwright.ir.partition import ModuleSplit


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def enter_column_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Identity forward, all-reduce of the gradient backward, whatever the gradient's strides."""
    return _ContiguousGradient.apply(ds_layers.ColumnParallel.apply(group, x))


def leave_row_region(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce forward, identity backward, whatever the strides of x."""
    return ds_layers.RowParallel.apply(group, x.contiguous(), False)


class ColumnLinear(ds_layers.LinearLayer):
    """Output features cut; the output stays local."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias)


class PackedColumnLinear(ds_layers.SubParamLinearLayer):
    """Output features of a fused projection (q, k, v), each block cut on its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias)


class RowLinear(ds_layers.LinearAllreduce):
    """Input features cut, the sum reduced; the bias is whole and added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave_row_region(F.linear(x, self.weight), self.mp_group)
        return y if self.bias is None else y + self.bias


class GatheredColumnLinear(ds_layers.LinearLayer):
    """Output features cut; the whole output on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias)
        return ds_layers.GatherFromTensorParallelRegion.apply(self.mp_group, y, self._partition_sizes)


class SplittingRowLinear(RowLinear):
    """Input features cut, of an input that every rank has whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = ds_layers.ScatterToTensorParallelRegion.apply(self.mp_group, x, self._partition_sizes, self.tp_index)
        return super().forward(own)


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """A whole parameter that each tensor rank applies to its own heads: its gradient is the sum over the ranks."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for parameter in module.parameters():
        parameter.register_hook(summed)


class VocabularyHead(ds_layers.VocabParallelLinear):
    """Output embedding that keeps its own vocabulary slice's logits (B, S, V/t)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias)


class TiedVocabularyHead(nn.Module):
    """Output embedding that shares the input embedding's Parameter, already cut by vocabulary."""

    def __init__(self, weight: nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(enter_column_region(x, self.group), self.weight)


def split_module(model: nn.Module, split: ModuleSplit, group: dist.ProcessGroup) -> None:
    """Replaces one module of `model` by its parallel layer; the caller has called set_autotp_mode(training=True).

    Raises RuntimeError where the result is not what the plan says: never train on a split that nobody planned.
    """
    module = model.get_submodule(split.module)
    name = split.module
    if split.style == "colwise":
        parallel: nn.Module = ColumnLinear(module, group, name=name)
    elif split.style == "packed_colwise":
        blocks = len(split.parameters[0].blocks)
        parallel = PackedColumnLinear(module, group, shape=(blocks, -1), partition_dim=0, name=name)
    elif split.style == "rowwise":
        parallel = RowLinear(module, group, name=name)
    elif split.style == "vocabulary_embedding":
        parallel = ds_layers.VocabParallelEmbedding(module, group, name=name)
    elif split.style == "vocabulary_head":
        parallel = (
            VocabularyHead(module, group, name=name) if split.parameters else TiedVocabularyHead(_weight(module), group)
        )
    elif split.style == "colwise_gather_output":
        parallel = GatheredColumnLinear(module, group, name=name)
    elif split.style == "rowwise_split_input":
        parallel = SplittingRowLinear(module, group, name=name)
    elif split.style == "replicated_with_grad_allreduce":
        sum_gradients(module, group)
        return
    elif split.style == "replicated":
        return
    else:
        raise RuntimeError(f"{name}: no lowering for the tensor-parallel style {split.style!r}")
    model.set_submodule(name, parallel)
    _check(parallel, split, dist.get_rank(group))


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _check(module: nn.Module, split: ModuleSplit, tensor_rank: int) -> None:
    parameters = dict(module.named_parameters())
    for planned in split.parameters:
        leaf = planned.name.rsplit(".", 1)[1]
        shape, got = planned.shard_shape(tensor_rank), tuple(parameters[leaf].shape)
        # A Conv1D weight is planned in Hugging Face's layout and held transposed (weights.conv1d_to_linear).
        if got != shape and got != shape[::-1]:
            raise RuntimeError(f"{planned.name} is {got} on tensor rank {tensor_rank}, the plan says {shape}")
        sharded = planned.dimension is not None
        if bool(getattr(parameters[leaf], "tensor_model_parallel", False)) != sharded:
            raise RuntimeError(f"{planned.name} would be counted wrongly in the gradient norm")


def adjust_head_counts(module: nn.Module, degree: int) -> None:
    """Attention modules that keep head counts as attributes work on their share of them.

    Llama-type modules view by head_dim and need nothing; GPT-2's splits the fused projection by `split_size`.
    """
    for attribute in ("split_size", "num_heads", "embed_dim"):
        if hasattr(module, attribute) and hasattr(module, "c_attn"):
            setattr(module, attribute, getattr(module, attribute) // degree)
