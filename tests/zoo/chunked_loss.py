"""Whether the loss of a type can be computed chunk by chunk: what stands in the compiler's table as
proved."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.models.model_skeleton import OutputHead
from shardwright.utils.numeric_difference import largest_difference, relative_error

TOLERANCE = 1e-6
"""Of the largest logit: a matrix product of fewer rows may sum in another order."""


def why_not_chunked(model: nn.Module, input_ids: torch.Tensor) -> str:
    """ "" where chunks give the model's own logits and gradients. model: tiny, nothing random;
    input_ids (B, S)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    whole = model(input_ids=input_ids, use_cache=False).logits
    try:
        tail = OutputHead(model)
        hidden = tail.hidden(lambda: model(input_ids=input_ids, use_cache=False))
        if hidden.shape[:2] != input_ids.shape:
            return "its hidden states are not one row a token"
        cuts = range(0, hidden.shape[1], 5)
        chunks = torch.cat([tail.logits(hidden[:, at : at + 5]) for at in cuts], dim=1)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        return (
            "its head cannot be run alone: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0][:150]}"
        )
    if chunks.shape != whole.shape:
        return f"the logits of its chunks are {tuple(chunks.shape)}, not {tuple(whole.shape)}"
    off = relative_error(chunks, whole, smallest_scale=1.0)
    if not off <= TOLERANCE:
        return f"the logits of its chunks differ by {off:.1e}"
    pairs = zip(_gradients(chunks, parameters), _gradients(whole, parameters), strict=True)
    off = largest_difference(relative_error(a, b, smallest_scale=1.0) for a, b in pairs)
    return "" if off <= 1e-4 else f"the gradients of its chunks differ by {off:.1e}"


def _gradients(logits: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    found = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
