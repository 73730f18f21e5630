"""Compute a rank's linears in the plan's low precision with torchao's linears, which share the
weights. A CPU emulates them: it rounds the operands, and multiplies in the compute dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardwright.diagnostics import Refusal, refusal
from shardwright.plan.plan import Plan
from shardwright.utils.installation import missing_torchao


def convert_linears(model: nn.Module, plan: Plan, recipes: Mapping[str, str]) -> None:
    """Replace the planned linears in place, before anything is sharded.

    recipes: format -> torchao's name for it

    Raises Refusal with SW6017, or SW6261 where a planned module is no linear.
    """
    if plan.low_precision is None:
        return
    if absent := missing_torchao():
        raise Refusal(absent)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    planned = frozenset(plan.low_precision.modules)
    for path in plan.low_precision.modules:
        if type(module := model.get_submodule(path)) is not nn.Linear:
            raise refusal(
                "SW6261",
                f"{path} is a {type(module).__name__}, no linear that low precision converts",
                "Nothing was trained. Name it in training.low_precision_keep, and compile again.",
                ("training", "low_precision"),
            )
    recipe = recipes[plan.low_precision.format]
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=plan.is_cpu, pad_inner_dim=True
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda _, path: path in planned, config=config
    )
    if plan.strategy.zero_stage == 3:
        for path in plan.low_precision.modules:
            linear: Any = model.get_submodule(path)
            linear.forward = partial(_forward_of_partitioned, linear)


def low_precision_weights(model: nn.Module) -> frozenset[int]:
    """Return the ids of the weights whose products run in low precision."""
    return frozenset(
        id(module.weight) for module in model.modules() if type(module).__name__ == "Float8Linear"
    )


class _PartitionedProduct(torch.autograd.Function):
    """Compute torchao's product, and save the weight itself for the backward pass.

    torchao saves a view, which would keep every gathered weight of ZeRO-3 until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: Any) -> torch.Tensor:
        product = _product()
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        unused = SimpleNamespace(save_for_backward=lambda *tensors: None)
        y: torch.Tensor = product.forward(
            unused, x, weight.t(), linear.linear_mm_config, linear.config
        )
        return y

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        saved = SimpleNamespace(
            saved_tensors=(x, weight.t()),
            linear_mm_config=ctx.linear.linear_mm_config,
            config=ctx.linear.config,
        )
        of_x, of_weight, *_ = _product().backward(saved, gradient)
        return of_x, of_weight.t(), None


def _product() -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args


def _forward_of_partitioned(linear: Any, x: torch.Tensor) -> torch.Tensor:
    product: Any = _PartitionedProduct.apply
    y: torch.Tensor = product(x, linear.weight, linear)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)
