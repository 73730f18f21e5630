"""Quantize an optimizer's moments to 8 bits with one scale a block (arXiv 2110.02861).

The codes are those of torchao's and bitsandbytes' dynamic map (arXiv 1511.04561).
"""

from __future__ import annotations

import functools

import torch

_EXPONENTS = 7
_LEAST_SCALE = 1e-12


@functools.cache
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of the codes in [-1, 1], or in [0, 1], in order."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        bounds = torch.linspace(0.1, 1, count)
        means = 10 ** (exponent - _EXPONENTS + 1) * ((bounds[:-1] + bounds[1:]) / 2.0)
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@functools.cache
def _midpoints(signed: bool, device: torch.device) -> torch.Tensor:
    values = dynamic_map(signed, device)
    return (values[:-1] + values[1:]) * 0.5


def dequantized(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the values of codes (blocks, size) with a scale each block."""
    return dynamic_map(signed, codes.device)[codes.int()] * scales[:, None]


def block_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks by their largest magnitudes."""
    return largest.clamp(min=_LEAST_SCALE)


def quantized(values: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the codes of values (blocks, size), the nearest ones."""
    midpoints = _midpoints(signed, values.device)
    return torch.bucketize(values / scales[:, None], midpoints, right=True).to(torch.uint8)
