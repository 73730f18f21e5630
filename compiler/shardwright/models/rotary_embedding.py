"""Rotary embeddings whose frequencies depend on the length of what is passed: dynamic NTK and
longrope.

transformers takes the length from the positions that a forward is handed
(modeling_rope_utils.dynamic_rope_update). A piece of a sequence has other positions than the whole,
so it is the whole's that such an embedding must see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.models.model_skeleton import replace_forward

Last = Callable[[torch.Tensor], int]
"""Positions (B, S/s) of a piece -> the last position of the whole sequences."""


def length_dependent_rope(model: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings of `model` that choose their frequencies by the length of the
    sequence."""
    return [
        m
        for m in model.modules()
        if any(_depends(kind) for kind in _kinds(getattr(m, "rope_type", None)))
    ]


def _kinds(rope_type: Any) -> list[str]:
    """One kind, or one for each kind of layer."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return [kind for kind in kinds if isinstance(kind, str)]


def _depends(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


@contextmanager
def full_sequence_rope(model: nn.Module, last: Last) -> Iterator[None]:
    """Let the length-dependent embeddings of `model` see the last position of the whole sequences
    inside."""
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
    """Return (cosines, sines) of the piece, each (B, S/s, D), or the one table of a type that has
    one. The last position goes in behind the piece's own and comes off again: tables of whole
    sequences would take memory."""
    behind = torch.full_like(position_ids[..., :1], last(position_ids))
    made = inner(x, torch.cat([position_ids, behind], dim=-1), *args, **kwargs)
    return (
        tuple(table[..., :-1, :] for table in made)
        if isinstance(made, tuple)
        else made[..., :-1, :]
    )
