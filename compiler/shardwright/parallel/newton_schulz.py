"""Orthogonalize Muon's updates by Newton-Schulz iterations
(https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from shardwright.layout.fused_weights import JoinedMatrices

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


def orthogonalized(update: torch.Tensor, joined: JoinedMatrices, steps: int) -> torch.Tensor:
    """Return a weight's update (..., out, in), each matrix by itself, scaled by
    sqrt(max(1, out / in))."""
    if joined.order.is_transposed:
        upright = replace(joined, order=replace(joined.order, is_transposed=False))
        return orthogonalized(update.mT.contiguous(), upright, steps).mT.contiguous()
    found = torch.empty_like(update)
    rows, columns = update.shape[-2:]
    groups = joined.order.groups
    stacked, result = (
        tensor.view(-1, groups, rows // groups, columns) for tensor in (update, found)
    )
    each = max(1, _CHUNK_ELEMENTS // max(1, rows * columns))
    for first in range(0, len(stacked), each):
        begin = 0
        for part in joined.rows or (rows,):
            of_matrix = (
                slice(first, first + each),
                slice(None),
                slice(begin, begin + part // groups),
            )
            block = stacked[of_matrix].reshape(-1, part, columns)
            scale = math.sqrt(max(1.0, part / columns))
            matrices = newton_schulz(block, steps) * scale
            result[of_matrix] = matrices.view(-1, groups, part // groups, columns)
            begin += part // groups
    return found
