"""Model types whose own loop computes something between the layers that no argument shows: one
small adapter each.

An adapter changes the forward of module instances, in place, so that the hidden states carry what
the loop keeps; the model computes the same bits before and after. Everything else is found by the
probe. New forwards are bound methods: a closure over a module would still mean the original in a
copy of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


def _inkling2(model: Any) -> None:
    """The loop collects hidden states of earlier layers in `block_states`, which later layers and
    the final norm read. Here they travel in front of the hidden states: (B, S, blocks + 1, H)."""
    for layer in model.model.layers:
        layer.collects, layer.is_block_boundary = (
            layer.is_block_boundary,
            False,
        )  # the loop itself collects nothing
        layer.forward = MethodType(_inkling2_layer, layer)
    model.model.final_input.forward = MethodType(_inkling2_final, model.model.final_input)


def _inkling2_layer(
    layer: Any, hidden: torch.Tensor, _: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)  # the embedding's has no blocks
    layer.is_block_boundary = layer.collects
    out = type(layer).forward(layer, carried[..., -1, :], carried[..., :-1, :], **kwargs)
    layer.is_block_boundary = False
    return torch.cat(
        [carried if layer.collects else carried[..., :-1, :], out.unsqueeze(-2)], dim=-2
    )


def _inkling2_final(module: Any, _: torch.Tensor, hidden: torch.Tensor) -> Any:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)
    return type(module).forward(module, carried[..., :-1, :], carried[..., -1, :])


ADAPTERS: dict[str, Callable[[nn.Module], None]] = {
    "inkling2_text": _inkling2,
}


def _deepstack(decoder: Any, features: int) -> None:
    """The loop adds a tower's features behind each of its first layers, at the places of pictures.
    Here they travel beside the hidden states, each scattered over the row, (B, S, 1 + those not
    added yet, H): of one shape, however many pictures a row holds."""
    decoder.deepstack_features = features
    for index, layer in enumerate(decoder.layers[:features]):
        layer.deepstack_left = features - index
        layer.forward = MethodType(_deepstack_layer, layer)
    decoder.forward = MethodType(_deepstack_forward, decoder)


def _deepstack_forward(decoder: Any, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
    places, added = (
        kwargs.pop("visual_pos_masks", None),
        kwargs.pop("deepstack_visual_embeds", None),
    )
    rows = [torch.zeros_like(inputs_embeds)] * decoder.deepstack_features
    if added is not None:
        rows = [
            row.masked_scatter(places.unsqueeze(-1), each.to(row))
            for row, each in zip(rows, added, strict=True)
        ]
    carried = torch.stack([inputs_embeds, *rows], dim=-2)
    return type(decoder).forward(decoder, *args, inputs_embeds=carried, **kwargs)


def _deepstack_layer(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = type(layer).forward(layer, hidden[..., 0, :], *args, **kwargs) + hidden[..., 1, :]
    if layer.deepstack_left == 1:
        return out  # type: ignore[no-any-return]
    return torch.cat([out.unsqueeze(-2), hidden[..., 2:, :]], dim=-2)


def patch_forwards(model: Any) -> bool:
    """Before the model is probed, and before a pipeline is built of it. Whether its type has an
    adapter."""
    adapter = ADAPTERS.get(model.config.model_type)
    if adapter is not None:
        adapter(model)
    adapted = adapter is not None
    tower = getattr(model.config, "vision_config", None)
    features = len(getattr(tower, "deepstack_visual_indexes", None) or ())
    for module in list(model.modules()) if features else ():
        if "deepstack_visual_embeds" in inspect.signature(type(module).forward).parameters:
            _deepstack(module, features)
            adapted = True
    return adapted
