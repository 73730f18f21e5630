"""Look up rates of kernels that depend on the chip, not on its peak alone (chip_rates.json, with
sources).

Fused attention by library, forward and backward apart: TFLOP/s of causal attention, half the scores
counted, on long sequences with a head of 128. A shorter sequence or a smaller head has a lower one.
Products whose rows are not multiples of 16 bytes: where the chip's own instructions cannot load
them, an older chip's kernels run.

A recipe's own GPU with the half-precision peak and the compute units of a listed chip is that chip,
with its own watts, memory and bandwidth (layout/gpu_cluster.py). Boards of a chip differ by their
peak and their power limit (kernel_seconds.board_speed).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal, TypedDict

from shardwright.layout.gpu_cluster import CatalogueGpu, Gpu, catalogue
from shardwright.recipe.literal_types import LowPrecision

AttentionLibrary = Literal["torch", "best", "flash", "flash1", "cudnn", "flash3"]
"""torch: what its scaled_dot_product_attention takes on the chip; best: the fastest one."""
HEAD_DIM = 128
"""Gives the head dimension of the measured rates."""


class LibraryCurve(TypedDict):
    """Hold how a library's rate falls, forward and backward.

    half_dim: head dimension at which half the rate of the largest heads is left
    half_length: tokens of a sequence at which half the rate of the longest ones is left
    """

    title: str
    half_dim: tuple[float, float]
    half_length: tuple[float, float]
    source: str


class ChipRates(TypedDict):
    """Hold a chip's TFLOP/s.

    board: the catalogue's GPU that has these rates at its power limit
    libraries: of fused attention, forward and backward
    best, torch: the library that is the fastest, and the one that torch takes
    low_precision_gain: rate of large products in that format over half precision's
    unaligned_products: of widths that are no multiples of 8; None where alignment costs a factor
    """

    board: str
    libraries: dict[str, tuple[float, float]]
    best: str
    torch: str
    unaligned_products: float | None
    low_precision_gain: dict[str, float]
    source: str


class _Fallback(TypedDict):
    """Hold TFLOP/s of two chips: the peak of products, and fused attention's."""

    peak: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    source: str


class _Rates(TypedDict):
    libraries: dict[str, LibraryCurve]
    chips: dict[str, ChipRates]
    chip_of: dict[str, str]
    unknown_chip: _Fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Describe fused attention on a GPU.

    share: FLOP/s over the GPU's dense half-precision peak, forward and backward, on long sequences
        with a head of 128
    half_dim, half_length: LibraryCurve's
    """

    share: tuple[float, float]
    half_dim: tuple[float, float]
    half_length: tuple[float, float]

    def shares(self, head_dim: float, length: int) -> tuple[float, float]:
        """Return the shares of the peak, forward and backward, of these sequences and heads."""
        forward, backward = (
            share
            * (head_dim / (head_dim + dim))
            / (HEAD_DIM / (HEAD_DIM + dim))
            * (length / (length + tokens))
            for share, dim, tokens in zip(self.share, self.half_dim, self.half_length, strict=True)
        )
        return forward, backward


@functools.cache
def _rates() -> _Rates:
    text = resources.files("shardwright.cost").joinpath("chip_rates.json").read_text("utf-8")
    rates: _Rates = json.loads(text)
    return rates


def _chip(gpu: Gpu) -> ChipRates | None:
    rates = _rates()
    return rates["chips"].get(rates["chip_of"].get(gpu.chip, gpu.chip))


def measured_board(gpu: Gpu) -> CatalogueGpu | None:
    """Return the board that the rates of the GPU's chip hold for; None where none are listed."""
    chip = _chip(gpu)
    return None if chip is None else catalogue()["gpus"][chip["board"]]


def unaligned_product_flops(gpu: Gpu) -> float | None:
    """Return FLOP/s of half-precision products whose widths are no multiples of 8, if known."""
    chip = _chip(gpu)
    rate = None if chip is None else chip["unaligned_products"]
    return None if rate is None else rate * 1e12


def low_precision_gain(gpu: Gpu, low_precision: LowPrecision) -> float:
    """Return the rate of large products in the format over half precision's; 1.0 where the chip
    has no instructions for it."""
    chip = _chip(gpu)
    if chip is None or low_precision == "none":
        return 1.0
    return chip["low_precision_gain"].get("fp4" if low_precision == "nvfp4" else "fp8", 1.0)


def _unknown_chip_shares(peak: float) -> tuple[float, float]:
    """Return fused attention's shares of the peak, forward and backward, on a chip that is not
    listed. peak: FLOP/s of dense products in half precision"""
    known = _rates()["unknown_chip"]
    low, high = known["peak"]

    def share(rate: tuple[float, float]) -> float:
        exponent = math.log(rate[1] / rate[0]) / math.log(high / low)
        beyond: float = (peak / 1e12 / low) ** (exponent - 1)
        return rate[0] / low * min(1.0, beyond)

    return share(known["forward"]), share(known["backward"])


def library_flops(gpu: Gpu, library: str) -> tuple[float, float]:
    """Return FLOP/s of a library's fused attention on a listed chip, forward and backward.

    Raises KeyError where the chip or the library is not listed.
    """
    chip = _chip(gpu)
    if chip is None:
        raise KeyError(gpu.name)
    forward, backward = chip["libraries"][library]
    return forward * 1e12, backward * 1e12


def half_precision_peak(peaks: Mapping[str, float]) -> float:
    """Return the dense peak of bf16 or fp16; the largest of all without them."""
    return max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0)) or max(peaks.values())


def attention_rate(gpu: Gpu, library: AttentionLibrary, speed: float = 1.0) -> AttentionRate:
    """Return the rate of fused attention of a GPU; another library's where it lacks this one.

    speed: of the GPU's board over that of the chip's rates
    """
    peak = half_precision_peak(gpu.peak_flops)
    rates, chip = _rates(), _chip(gpu)
    if gpu.attention_flops is not None:
        chosen, share = (
            "flash",
            (
                gpu.attention_flops[0] / peak,
                gpu.attention_flops[1] / peak,
            ),
        )
    elif chip is None:
        chosen, share = "flash", _unknown_chip_shares(peak)
    else:
        chosen = chip[library] if library in ("torch", "best") else library
        chosen = chosen if chosen in chip["libraries"] else chip["torch"]
        forward, backward = chip["libraries"][chosen]
        share = (speed * forward * 1e12 / peak, speed * backward * 1e12 / peak)
    curve = rates["libraries"][chosen]
    half_dim, half_length = curve["half_dim"], curve["half_length"]
    return AttentionRate(
        share=share,
        half_dim=(half_dim[0], half_dim[1]),
        half_length=(half_length[0], half_length[1]),
    )
