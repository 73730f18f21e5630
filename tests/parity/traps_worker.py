"""Runs under `deepspeed --num_gpus 2`: measures each trap with the runtime's workaround and without
it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed import ops
from deepspeed.module_inject import layers as ds_layers
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding, ParameterSharding, shard_sizes
from shardwright.parallel.tensor_parallel import TensorSplitter
from shardwright.train.training_worker import leave
from shardwright.utils.numeric_difference import max_abs_diff

Layer = Callable[[nn.Linear, dist.ProcessGroup], nn.Module]


def ours(style: str) -> Layer:
    """What the runtime makes of a plain linear."""

    def cut(linear: nn.Linear, group: dist.ProcessGroup) -> nn.Module:
        styles: dict[str, dict[str, int | None]] = {
            "colwise": {"weight": 0, "bias": 0},
            "rowwise": {"weight": 1, "bias": None},
        }
        dimensions = styles[style]
        splits = []
        for leaf, parameter in linear.named_parameters():
            shape, dimension = tuple(parameter.shape), dimensions[leaf]
            blocks = () if dimension is None else (shape[dimension],)
            sizes = (
                ()
                if dimension is None
                else shard_sizes(shape[dimension], dist.get_world_size(group))
            )
            splits.append(
                ParameterSharding(
                    name=f"0.{leaf}", shape=shape, dimension=dimension, blocks=blocks, sizes=sizes
                )
            )
        split = ModuleSharding(module="0", style=style, parameters=tuple(splits))
        TensorSplitter(nn.Sequential(linear), (split,), frozenset(), group).split(split)
        return linear

    return cut


column, row = ours("colwise"), ours("rowwise")


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, non-contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


class _StridedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return strided(g)


def column_backward_error(group: dist.ProcessGroup, kind: Layer, plain: nn.Linear) -> float:
    """Largest error of dX where the gradient that arrives at the region's border is strided."""
    layer = kind(copy.deepcopy(plain), group)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wanted = torch.autograd.grad(plain(x).square().sum(), x)[0]
    # F.linear's own backward yields a contiguous dX; a strided one is what HF's transposed views
    # produce.
    linear, matmul = F.linear, torch.matmul
    stride_gradient: Callable[..., torch.Tensor] = _StridedGradient.apply
    with (
        patch.object(F, "linear", lambda a, w, b=None: linear(stride_gradient(a), w, b)),
        patch.object(torch, "matmul", lambda a, b: matmul(stride_gradient(a), b)),
    ):
        got = torch.autograd.grad(layer(x).square().sum(), x)[0]
    return max_abs_diff(got, wanted)


def row_forward_error(group: dist.ProcessGroup, kind: Layer, plain: nn.Linear) -> float:
    layer = kind(copy.deepcopy(plain), group)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2))
    wanted, rank = plain(x), dist.get_rank(group)
    linear, matmul = F.linear, torch.matmul
    with (
        patch.object(F, "linear", lambda a, w, b=None: strided(linear(a, w, b))),
        patch.object(torch, "matmul", lambda a, b: strided(matmul(a, b))),
    ):
        got = layer(x[..., rank * 4 : rank * 4 + 4].contiguous())
    return max_abs_diff(got, wanted)


def requires_grad(group: dist.ProcessGroup, kind: Layer) -> float:
    """Of a layer that is built before anything has told DeepSpeed that it is for training."""
    ds_layers.set_autotp_mode(training=False)
    layer = kind(nn.Linear(8, 8), group)
    ds_layers.set_autotp_mode(training=True)
    return float(layer.get_parameter("weight").requires_grad)


def gradient_norms(group: dist.ProcessGroup, plain: nn.Linear) -> list[float]:
    """Single process; cut with the marks of the parallel layer; cut without them."""
    grid = PipelineParallelGrid(
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    )
    deepspeed.utils.groups.mpu = grid
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    plain.zero_grad()
    plain(x).square().sum().backward()
    wanted = (
        torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        .norm()
        .item()
    )
    layer = column(copy.deepcopy(plain), group)
    layer(x).square().sum().backward()
    marked = float(clip_grad_norm_(layer.parameters(), 1e9, mpu=grid))
    for p in layer.parameters():
        delattr(p, "tensor_model_parallel")
    unmarked = float(clip_grad_norm_(layer.parameters(), 1e9, mpu=grid))
    return [wanted, marked, unmarked]


def pipeline_zero0_norm() -> list[float]:
    """The whole norm, and the one that DeepSpeed's fp32 ZeRO-0 clips by, of a two-stage
    pipeline."""
    torch.manual_seed(4)
    module = PipelineModule(
        [LayerSpec(nn.Linear, 8, 8) for _ in range(2)], num_stages=2, loss_fn=nn.MSELoss()
    )
    x = torch.ones(2, 8)
    module.forward_funcs[0](x).square().sum().backward()
    mine = sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)
    total = mine.clone()
    dist.all_reduce(total)
    partial = clip_grad_norm_(module.parameters(), 1e9, mpu=module.mpu())
    return [total.sqrt().item(), float(partial)]


def main() -> None:
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    group = dist.new_group([0, 1])
    ds_layers.set_autotp_mode(training=True)
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    figures = {
        "column_backward_error": [
            column_backward_error(group, k, plain) for k in (column, ds_layers.LinearLayer)
        ],
        "row_forward_error": [
            row_forward_error(group, k, plain) for k in (row, ds_layers.LinearAllreduce)
        ],
        "requires_grad": [requires_grad(group, k) for k in (column, ds_layers.LinearLayer)],
        "gradient_norm": gradient_norms(group, plain),
        "pipeline_zero0_norm": pipeline_zero0_norm(),
    }
    if dist.get_rank() == 0:
        Path(os.environ["SHARDWRIGHT_TRAPS_OUT"]).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
