"""DeepSpeed's parallel layers for plain nn.Linear: they carry the marks that its gradient norm and checkpoints need."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.module_inject import layers as ds_layers
from torch import nn

from shardwright.ir.partition import ModuleSplit
from shardwright.modules.tensor.regions import (
    enter_column_region,
    gather_output,
    leave_row_region,
    own_features,
    own_slices,
)


class ColumnLinear(ds_layers.LinearLayer):
    """Output features cut; the output stays local."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own_features(F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias))


class PackedColumnLinear(ds_layers.SubParamLinearLayer):
    """Output features of a fused projection (q, k, v; gate, up), each block cut on its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own_features(F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias))


class RowLinear(ds_layers.LinearAllreduce):
    """Input features cut, the sum reduced; the bias is whole and added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = leave_row_region(F.linear(x, self.weight), self.mp_group)
        return y if self.bias is None else y + self.bias


class GatheredColumnLinear(ds_layers.LinearLayer):
    """Output features cut; the whole output on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(enter_column_region(x, self.mp_group), self.weight, self.bias)
        return gather_output(y, tuple(self._partition_sizes), self.mp_group)


class SplittingRowLinear(RowLinear):
    """Input features cut, of an input that every rank has whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = sum(self._partition_sizes[: self.tp_index])
        return super().forward(own_slices(x, ((first, self._partition_sizes[self.tp_index]),), self.mp_group))


def parallel_linear(module: nn.Module, split: ModuleSplit, group: dist.ProcessGroup) -> nn.Module | None:
    """The layer that replaces `module`, its weight cut in place; None where DeepSpeed has none for it."""
    if type(module) is not nn.Linear or any(p.copies > 1 for p in split.parameters):
        return None
    match split.style:
        case "colwise":
            return ColumnLinear(module, group, name=split.module)
        case "packed_colwise":
            blocks = split.parameters[0].blocks
            return PackedColumnLinear(module, group, shape=(blocks, -1), partition_dim=0, name=split.module)
        case "rowwise":
            return RowLinear(module, group, name=split.module)
        case "colwise_gather_output":
            return GatheredColumnLinear(module, group, name=split.module)
        case "rowwise_split_input":
            return SplittingRowLinear(module, group, name=split.module)
    return None
