"""Model types whose own loop computes something between the layers that no argument shows: one small adapter each.

An adapter changes the forward of module instances, in place, so that the hidden states carry what the loop keeps; the
model computes the same bits before and after. Everything else is found by the probe. New forwards are bound methods:
a closure over a module would still mean the original in a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


def _inkling2(model: Any) -> None:
    """The loop collects hidden states of earlier layers in `block_states`, which later layers and the final norm read.
    Here they travel in front of the hidden states: (B, S, blocks + 1, H)."""
    for layer in model.model.layers:
        layer.collects, layer.is_block_boundary = layer.is_block_boundary, False  # the loop itself collects nothing
        layer.forward = MethodType(_inkling2_layer, layer)
    model.model.final_input.forward = MethodType(_inkling2_final, model.model.final_input)


def _inkling2_layer(layer: Any, hidden: torch.Tensor, _: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)  # the embedding's has no blocks
    layer.is_block_boundary = layer.collects
    out = type(layer).forward(layer, carried[..., -1, :], carried[..., :-1, :], **kwargs)
    layer.is_block_boundary = False
    return torch.cat([carried if layer.collects else carried[..., :-1, :], out.unsqueeze(-2)], dim=-2)


def _inkling2_final(module: Any, _: torch.Tensor, hidden: torch.Tensor) -> Any:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)
    return type(module).forward(module, carried[..., :-1, :], carried[..., -1, :])


ADAPTERS: dict[str, Callable[[nn.Module], None]] = {
    "inkling2_text": _inkling2,
}


def adapt(model: Any) -> None:
    """Before the model is probed, and before a pipeline is built of it."""
    adapter = ADAPTERS.get(model.config.model_type)
    if adapter is not None:
        adapter(model)
