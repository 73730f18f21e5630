"""Make the plain model that FP8 is compared with: its linears round as torchao's do."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import (
    Float8Linear,
    matmul_with_hp_or_float8_args,
)
from transformers.pytorch_utils import Conv1D


def add_reference_low_precision(
    model: nn.Module, stack: str, recipe: str, keep: tuple[str, ...] = (), tensor: int = 1
) -> int:
    """Compute the decoder layers' linears in torchao's emulated low precision; return how many.

    By forwards alone, so that parameters keep their names and GPT-2's Conv1D its layout.

    recipe: torchao's name. keep: patterns of the paths of linears that stay. tensor: each linear is
        scaled in so many parts, as tensor ranks do: of its outputs, or of its inputs where it
        returns to the hidden size
    """
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    with torch.device("meta"):
        settings = Float8Linear(16, 16, config=config).linear_mm_config

    def forward(x: torch.Tensor, module: Any, *, is_last: bool) -> torch.Tensor:
        weight = module.weight if isinstance(module, Conv1D) else module.weight.t()  # (in, out)
        inputs = x.chunk(tensor, -1) if is_last else [x] * tensor
        parts = [
            matmul_with_hp_or_float8_args.apply(part, share, settings, config)
            for part, share in zip(inputs, weight.chunk(tensor, 0 if is_last else 1), strict=True)
        ]
        y = torch.stack(parts).sum(0) if is_last else torch.cat(parts, -1)
        return y if module.bias is None else y + module.bias

    count = 0
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if (
            path.startswith(stack + ".")
            and isinstance(module, nn.Linear | Conv1D)
            and leaf != "gate"
            and not any(fnmatchcase(path, entry) for entry in keep)
        ):
            is_last = leaf in ("o_proj", "down_proj", "c_proj")
            module.forward = partial(forward, module=module, is_last=is_last)  # type: ignore[method-assign]
            count += 1
    return count
