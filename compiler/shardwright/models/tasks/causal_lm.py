"""Find what loss a causal language model computes, and whether its logits are causal, by running
it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100
"""Label of a token without a loss."""


@torch.no_grad()
def own_loss(
    model: nn.Module, input_ids: torch.Tensor, beside: Mapping[str, torch.Tensor] | None = None
) -> str | None:
    """Return `PipelineSplit.loss`, or None where the logits are not (B, S, V).

    beside: other inputs of a vision-language model.
    """
    inputs = {"use_cache": False, **(beside or {})}
    logits = model(input_ids=input_ids, **inputs).logits
    if logits.ndim != 3 or logits.shape[:2] != input_ids.shape:
        return None
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())
    shifted = F.pad(input_ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    for kind, labels in (("next_token", input_ids), ("given", shifted)):
        try:
            loss = model(input_ids=input_ids, labels=labels, **inputs).loss
        except Exception:  # labels of another shape: codebooks, image tokens
            continue
        if loss is not None and torch.allclose(loss, expected, rtol=1e-5, atol=1e-6):
            return kind
    return "other"


@torch.no_grad()
def is_causal(
    model: nn.Module, input_ids: torch.Tensor, beside: Mapping[str, torch.Tensor] | None = None
) -> bool:
    """Return whether changing the last token leaves the earlier logits unchanged."""
    changed = input_ids.clone()
    # Replace the last token by another one of the same sequence.
    changed[:, -1] = torch.where(
        input_ids[:, -1] == input_ids[:, 0], input_ids[:, 1], input_ids[:, 0]
    )
    before, after = (
        model(input_ids=ids, use_cache=False, **(beside or {})).logits
        for ids in (input_ids, changed)
    )
    difference = (before - after).abs()
    # Not bitwise: some masks are large negative numbers, and expert sums change their order.
    return bool(
        difference.isfinite().all() and difference[:, :-1].max() <= 1e-3 * difference[:, -1].max()
    )
