"""Test whether sequences can be split over context ranks, without ranks.

Attention is replaced by a function of each token alone. Then nothing else may depend on other
tokens, or on where a part of the sequence starts. The function changes under rotary embeddings, so
that positions count; a product of a token's query and key would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from shardwright.models.model_skeleton import replace_forward
from shardwright.utils.numeric_difference import max_abs_diff

# Rotary embeddings whose frequencies depend on the sequence length: dynamic NTK and longrope.
# transformers takes the length from the positions of a forward
# (modeling_rope_utils.dynamic_rope_update), so a part of a sequence must see the full sequence's
# last position.


Last = Callable[[torch.Tensor], int]
"""Positions (B, S/s) of a part -> the last position of the full sequences."""


def length_dependent_rope(model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings of `model` whose frequencies depend on the sequence length."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each kind of layer
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                found.append(module)
                break
    return found


@contextmanager
def full_sequence_rope(model: nn.Module, last: Last) -> Iterator[None]:
    """Let length-dependent rotary embeddings see the full sequences' last position within the
    context."""
    with ExitStack() as stack:
        for module in length_dependent_rope(model):
            stack.enter_context(
                replace_forward(module, partial(_full_sequence_forward, module.forward, last))
            )
        yield


def _full_sequence_forward(
    inner: Callable[..., Any],
    last: Last,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return (cosines, sines) of a part, each (B, S/s, D), or a single table where the type has
    one.

    The last position is appended and its entry removed: tables of full sequences would take memory.
    """
    behind = torch.full_like(position_ids[..., :1], last(position_ids))
    tables = inner(x, torch.cat([position_ids, behind], dim=-1), *args, **kwargs)
    return (
        tuple(table[..., :-1, :] for table in tables)
        if isinstance(tables, tuple)
        else tables[..., :-1, :]
    )


TOLERANCE = 2e-5
"""Largest relative error of the logits: matrix products of other shapes sum in another order."""


def _tokenwise_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Replace attention by a function of each token.

    query: (B, H, S, D); key, value: (B, K, S, ...) -> (B, S, H, ...).
    """
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    direction = torch.linspace(-1.0, 2.0, query.shape[-1], dtype=query.dtype, device=query.device)
    score = ((query + 0.5 * key.roll(1, -1)) * direction).mean(-1, keepdim=True)
    return (value * torch.tanh(score)).transpose(1, 2).contiguous(), None


@contextmanager
def _no_attention() -> Iterator[list[object]]:
    """Yield a list that grows whenever a layer looks up its attention function."""
    lookups: list[object] = []

    def interface(*_: Any, **__: Any) -> Any:
        lookups.append(None)
        return _tokenwise_attention

    with patch.object(AttentionInterface, "get_interface", interface):
        yield lookups


@contextmanager
def _full_sequence_masks() -> Iterator[None]:
    """Give half of a sequence the mask of the full one, as on a context rank."""
    inner = masking_utils._preprocess_mask_arguments

    def of_two_halves(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        done, mask, packed, queries, keys, *offsets = inner(*args, **kwargs)
        return (
            done,
            mask,
            packed,
            *((queries, keys) if done else (2 * queries, 2 * keys)),
            *offsets,
        )

    with patch.object(masking_utils, "_preprocess_mask_arguments", of_two_halves):
        yield


@torch.no_grad()
def context_split_blocker(model: nn.Module, input_ids: torch.Tensor) -> str:
    """Return what, beside attention, prevents splitting sequences; "" where nothing does.

    model: tiny, without dropout. input_ids: (B, S).
    """
    length = input_ids.shape[1]
    places = torch.arange(length).expand_as(input_ids)

    def logits(ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        own = places[:, first : first + ids.shape[1]]
        with full_sequence_rope(model, lambda _: length - 1):
            return model(input_ids=ids, position_ids=own, use_cache=False).logits  # type: ignore[no-any-return]

    def in_halves() -> torch.Tensor:
        middle = length // 2
        halves = logits(input_ids[:, :middle]), logits(input_ids[:, middle:], middle)
        return torch.cat(halves, dim=1)

    with _no_attention() as lookups:
        full = model(input_ids=input_ids, use_cache=False).logits
        if not lookups:
            return "its attention does not go through transformers' attention interface"
        if not full.isfinite().all():
            return "a tiny copy's logits are not finite"
        scale = TOLERANCE * max(1.0, float(full.abs().max()))
        at = length // 3
        changed = input_ids.clone()
        changed[:, at] = torch.where(
            input_ids[:, at] == input_ids[:, 0], input_ids[:, -1], input_ids[:, 0]
        )
        other = model(input_ids=changed, use_cache=False).logits
        others = torch.arange(length) != at
        if not max_abs_diff(other[:, others], full[:, others]) <= scale:
            return "its tokens see each other outside of attention"
        try:
            pieces = in_halves()
        except TypeError:
            return "its forward takes no positions"
        if not max_abs_diff(pieces, full) <= scale:
            return "it counts its positions itself"
        try:
            with _full_sequence_masks():
                masked = in_halves()
        except RuntimeError:  # its shapes are those of the half
            masked = torch.full_like(full, math.nan)
        if not max_abs_diff(masked, full) <= scale:
            return "it uses the mask outside of attention"
    return ""
