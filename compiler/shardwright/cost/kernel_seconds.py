"""Estimate single GPU kernels: a roofline with tiles, waves, alignment and memory bandwidth.

Sources: the roofline model (Williams et al., 2009); tile and wave quantisation and alignment
(NVIDIA, Matrix Multiplication Background User's Guide); fused attention (arXiv 2205.14135,
2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.cost.chip_rates import (
    AttentionLibrary,
    AttentionRate,
    attention_rate,
    half_precision_peak,
    measured_board,
    unaligned_product_flops,
)
from shardwright.cost.cost_constants import Constants
from shardwright.layout.gpu_cluster import Gpu
from shardwright.recipe.literal_types import LowPrecision
from shardwright.utils.memoize import hashed_key, memoize

# Output tiles of cuBLAS's kernels, rows x columns; a product runs with the fastest for its shape.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
# Rate of a tile against 256 x 128. Operands are loaded once a tile, so a smaller one computes less
# per byte; its shared-memory traffic is (rows + columns) / (rows x columns).
TILE_RATE = {
    (256, 128): 1.0,
    (128, 256): 1.0,
    (128, 128): 0.96,
    (128, 64): 0.86,
    (64, 128): 0.86,
    (64, 64): 0.72,
}
# Split-K: parts of the reduction dimension where the output alone has too few tiles.
SPLITS = (1, 2, 4)
# Share of the peak that the fastest product reaches on a board that holds its clock (an A100: the
# prior of gemm_efficiency).
MAX_PRODUCT_EFFICIENCY = 0.86
# Fused attention recomputes its scores in the backward pass: five products against two (arXiv
# 2205.14135).
FUSED_BACKWARD_OVER_FORWARD = 2.5
ALIGNED_WIDTH = 64
ALIGNED_LOAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Hold the properties of a GPU and precision that kernels depend on.

    flops_per_second: dense peak of the precision
    sustained_share: share of it at the board's power limit
    cache_bytes: last-level cache
    attention: of fused attention, over the dense half-precision peak
    unaligned_flops: FLOP/s of products whose widths are no multiples of ALIGNED_LOAD; None where
        they have a factor alone
    """

    flops_per_second: float
    sustained_share: float
    bytes_per_second: float
    cache_bytes: float
    compute_units: int
    element_bytes: int
    attention: AttentionRate
    unaligned_flops: float | None


def device_of(
    gpu: Gpu,
    flops_per_second: float,
    element_bytes: int,
    c: Constants,
    library: AttentionLibrary = "torch",
) -> Device:
    """Return the device of a GPU and a precision.

    flops_per_second: dense peak of the precision with elements of element_bytes
    library: computes fused attention
    """
    share = sustained_share(c, flops_per_second, gpu.watts)
    if gpu.best_product_flops is not None and element_bytes < 4:
        share = min(share, gpu.best_product_flops / flops_per_second / MAX_PRODUCT_EFFICIENCY)
    speed = board_speed(gpu, c)
    unaligned = unaligned_product_flops(gpu) if element_bytes < 4 else None
    return Device(
        flops_per_second=flops_per_second,
        sustained_share=share,
        bytes_per_second=gpu.hbm_bytes_per_second,
        cache_bytes=gpu.cache_bytes,
        compute_units=gpu.compute_units,
        element_bytes=element_bytes,
        attention=attention_rate(gpu, library, speed),
        unaligned_flops=None if unaligned is None else speed * unaligned,
    )


def board_speed(gpu: Gpu, c: Constants) -> float:
    """Return the speed of a GPU's board over the one that its chip's rates hold for.

    It goes with units and clock, as the peak does. A lower power limit lowers the clock further;
    a higher one lifts a bound, so that such a board counts as the measured one.
    """
    board = measured_board(gpu)
    if board is None:
        return 1.0
    own = half_precision_peak(gpu.peak_flops)
    listed = 1e12 * half_precision_peak(board["peak_tflops"])
    clock = sustained_share(c, own, gpu.watts) / sustained_share(c, listed, board["watts"])
    return own / listed * min(1.0, clock)


@hashed_key
def _of(c: Constants) -> Hashable:
    return c


@memoize(lambda device, c, *, m, n, k, batch=1.0: (device, _of(c), m, n, k, batch))
def product_seconds(
    device: Device, c: Constants, *, m: float, n: int, k: int, batch: float = 1.0
) -> float:
    """Return the seconds of `batch` products of (m, k) by (k, n) in one kernel.

    batch: may be fractional (an average)
    """
    units = device.compute_units
    rate = device.flops_per_second * device.sustained_share / units * c.gemm_efficiency
    rate *= width_efficiency(device, c, batch * m, n, k)
    if device.unaligned_flops is not None and (n % ALIGNED_LOAD or k % ALIGNED_LOAD):
        rate = min(rate, device.unaligned_flops / units)
    moved = batch * (m * k + k * n + m * n) * device.element_bytes
    bandwidth = device.bytes_per_second * c.memory_efficiency
    best = math.inf
    for rows, columns in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        tile_seconds = 2 * rows * columns * k / (rate * TILE_RATE[rows, columns])
        for split in SPLITS:
            waves = math.ceil(tiles * split / units)
            seconds = waves * (tile_seconds / split + c.tile_seconds)
            traffic = moved + (2 * split * batch * m * n * 4 if split > 1 else 0)
            best = min(best, max(seconds, traffic / bandwidth))
            if tiles >= 2 * units or k < 1024:
                break
    return best


@memoize(lambda device, c, *, m, n, k, batch: (device, _of(c), m, n, k, batch))
def product_pass_seconds(
    device: Device, c: Constants, *, m: float, n: int, k: int, batch: float
) -> tuple[float, float, float]:
    """Return the seconds of a linear layer's products: forward, of its inputs' gradient, and of its
    weights' gradient."""
    forward = product_seconds(device, c, m=m, n=n, k=k, batch=batch)
    inputs = product_seconds(device, c, m=m, n=k, k=n, batch=batch)
    # Its rows are summed over: they need no alignment.
    summed = -(-max(1, round(m)) // ALIGNED_WIDTH) * ALIGNED_WIDTH if m > ALIGNED_WIDTH else m
    weights = product_seconds(device, c, m=n, n=k, k=max(1, round(summed)), batch=batch)
    return forward, inputs, weights


def sustained_share(c: Constants, flops_per_second: float, watts: float | None) -> float:
    """Return the share of the peak that a power limit allows to dense products.

    Dynamic power grows with the cube of the clock (f V^2, and V with f; Chandrakasan et al., 1992).
    A board with less than the peak's watts runs at the cube root of its share.
    """
    if watts is None:
        return 1.0
    return math.pow(min(1.0, watts / (c.watts_per_tflops * flops_per_second / 1e12)), 1 / 3)


def width_efficiency(device: Device, c: Constants, rows: float, *widths: int) -> float:
    """Return a product's efficiency factor for widths that are not multiples of 64 elements.

    Each halving of a width's power of two below 64 costs a factor. Down to 8 elements, a row starts
    inside a line of 128 bytes and shares lines with its neighbours. Only activations beyond the
    cache pay for that. Below 8 elements each load is broken up, wherever it comes from.

    rows: rows of the activations
    """

    def halvings(width: int, most: int) -> float:
        return math.log2(most / math.gcd(most, width))

    def from_memory(width: int) -> float:
        return max(0.0, 1 - device.cache_bytes / (rows * width * device.element_bytes))

    loads = max(halvings(width, ALIGNED_LOAD) for width in widths)
    lines = max(
        from_memory(width) * (halvings(width, ALIGNED_WIDTH) - halvings(width, ALIGNED_LOAD))
        for width in widths
    )
    return math.pow(c.width_alignment_efficiency, loads + lines)


def load_efficiency(c: Constants, head_dim: int) -> float:
    """Return the efficiency for a head size: tensor cores load 16 bytes, or multiples of 8
    elements."""
    return c.load_alignment_efficiency if head_dim % ALIGNED_LOAD else 1.0


def traffic_seconds(device: Device, c: Constants, moved_bytes: float) -> float:
    return moved_bytes / (device.bytes_per_second * c.memory_efficiency)


def head_norm_seconds(device: Device, c: Constants, moved_bytes: float) -> float:
    """Return the seconds of eager norms of single heads, one kernel an operator.

    Their rows are short and, in the backward pass, strided, so multiprocessors bound them where the
    memory is fast.
    """
    rate = min(
        device.bytes_per_second * c.memory_efficiency,
        device.compute_units * c.head_norm_unit_bytes_per_second,
    )
    return moved_bytes / rate


TORCHAO_CASTS: Mapping[tuple[str, LowPrecision], tuple[str, str]] = {
    ("hf", "fp8_tensorwise"): ("low_precision_cast_bytes_hf", "unfused_cast_efficiency"),
    ("hf", "fp8_rowwise"): ("low_precision_cast_bytes_hf", "unfused_cast_efficiency"),
    ("compiled", "fp8_tensorwise"): ("low_precision_cast_bytes_compiled", "memory_efficiency"),
    ("compiled", "fp8_rowwise"): ("low_precision_cast_bytes_rowwise", "unfused_cast_efficiency"),
}
"""Maps (family of kernels, format) to two constants: the bytes that a cast moves per element, and
the share of the memory bandwidth. Other pairs are Transformer Engine's."""


def linear_cast_seconds(
    device: Device,
    c: Constants,
    *,
    low_precision: LowPrecision,
    family: str,
    m: float,
    n: int,
    k: int,
) -> tuple[float, float]:
    """Return the forward and backward seconds of scaling and casting a linear's operands.

    Transformer Engine casts each of the three once, in both layouts. torchao casts each anew for
    both products that it is in (torchao/float8/float8_linear.py, matmul_with_hp_or_float8_args);
    maxima of columns, which rows' scales need, are as slow compiled as in PyTorch's own kernels.

    family: of kernels
    """
    operands, gradients = (m + n) * k, m * n
    torchao = TORCHAO_CASTS.get((family, low_precision))
    if torchao is None:
        moved = c.low_precision_cast_bytes_megatron
        return traffic_seconds(device, c, moved * operands), traffic_seconds(
            device, c, moved * gradients
        )
    moved, efficiency = (getattr(c, name) for name in torchao)
    seconds = moved / (device.bytes_per_second * efficiency)
    return seconds * operands, seconds * (operands + 2 * gradients)


def fused_attention_seconds(
    device: Device, c: Constants, *, flops: float, head_dim: int, length: int
) -> tuple[float, float]:
    """Return the forward and backward seconds of fused causal attention.

    The forward pass has two products, the backward pass five (arXiv 2205.14135): it recomputes the
    scores. Half the scores are skipped.

    flops: forward, of the full S x S
    length: of a sequence (tokens)
    """
    forward, backward = device.attention.shares(head_dim, length)
    full = flops / 2 / device.flops_per_second
    full /= c.fused_attention_efficiency * load_efficiency(c, head_dim)
    return full / forward, FUSED_BACKWARD_OVER_FORWARD * full / backward


def eager_attention_seconds(
    device: Device, c: Constants, *, heads: float, head_dim: int, length: int, passes: float
) -> float:
    """Return the forward seconds of two batched products and the kernels between them.

    heads: micro-batch x local heads
    """
    products = product_seconds(
        device, c, m=length, n=length, k=max(64, head_dim), batch=heads
    ) + product_seconds(device, c, m=length, n=max(64, head_dim), k=length, batch=heads)
    between = traffic_seconds(device, c, heads * length * length * passes * device.element_bytes)
    return products / load_efficiency(c, head_dim) + between
