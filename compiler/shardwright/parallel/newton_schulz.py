"""Orthogonalize Muon's updates by Newton-Schulz iterations
(https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
_CHUNK_ELEMENTS = 2**26
"""Bounds the experts that are orthogonalized at a time, and so the temporary memory."""


def newton_schulz(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return matrices (..., rows, columns) with their singular values brought near 1, in their
    dtype."""
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    found: torch.Tensor = x.mT if is_tall else x
    return found


def orthogonalized(update: torch.Tensor, parts: tuple[int, ...], steps: int) -> torch.Tensor:
    """Return a weight's update (..., out, in), each matrix by itself, scaled by
    sqrt(max(1, out / in)).

    parts: output features of each matrix that the weight joins; () for one
    """
    found = torch.empty_like(update)
    stacked = update.view(-1, *update.shape[-2:])
    result = found.view(-1, *update.shape[-2:])
    each = max(1, _CHUNK_ELEMENTS // max(1, stacked[0].numel()))
    for first in range(0, len(stacked), each):
        begin = 0
        for rows in parts or (update.size(-2),):
            block = stacked[first : first + each, begin : begin + rows]
            scale = math.sqrt(max(1.0, rows / update.size(-1)))
            result[first : first + each, begin : begin + rows] = newton_schulz(block, steps) * scale
            begin += rows
    return found
