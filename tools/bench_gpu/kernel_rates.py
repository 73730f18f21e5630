"""TFLOP/s of attention and of matrix products on this GPU, forward and backward apart, on random
data: what the constants of the cost model are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UPS, REPEATS, SECONDS = 2, 20, 0.4
TOKENS = 32768
"""Limits the tokens of one call of attention, in rows of one length; a longer row stands alone."""
LENGTHS = (2048, 8192, 32768, 131072)
HEADS = {"gqa-128": (32, 8, 128, 128), "mha-64": (32, 32, 64, 64), "mla": (16, 16, 192, 128)}
"""Name -> query heads, key heads, dimension of queries and keys, dimension of values."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PRODUCTS = {
    "square-8192": (8192, 8192, 8192),
    "square-16384": (16384, 16384, 16384),
    "llama-8b-up": (8192, 4096, 14336),
    "llama-8b-down": (8192, 14336, 4096),
    "qwen3-30b-qkv": (8192, 2048, 5120),
    "llama-70b-up": (8192, 8192, 28672),
}
"""Name -> rows, depth and columns."""
GROUPS = {
    "mixtral-ep8": (1, 16384, 4096, 14336),
    "mixtral-ep1": (8, 16384, 4096, 14336),
    "qwen3-30b-ep8": (16, 65536, 2048, 768),
    "qwen3-30b-ep1": (128, 65536, 2048, 768),
    "deepseek-v3-ep64": (4, 32768, 7168, 2048),
    "gpt-oss-120b-ep8": (16, 32768, 2880, 2880),
}
"""Name -> experts on a rank, rows of all of them (the same number for each), depth and columns."""


def kernel_rates() -> dict[str, dict[str, Any]]:
    """Kind of kernel -> name -> TFLOP/s, or `why` there is none. A causal score counts by half."""
    products = {
        f"{name} {how}": _or_why(partial(measure, *shape, device="cuda"))
        for name, shape in PRODUCTS.items()
        for how, measure in (
            ("bf16", product),
            ("fp8 tensorwise", partial(product_fp8, rowwise=False)),
            ("fp8 rowwise", partial(product_fp8, rowwise=True)),
            ("cast", cast_to_fp8),
        )
    }
    grouped = {
        f"{name}{how}": _or_why(partial(measure, *shape, device="cuda"))
        for name, shape in GROUPS.items()
        for how, measure in (("", grouped_products), (" as one product", one_product))
    }
    attended = {
        f"{name} {length} {backend}": _or_why(
            partial(attention, *heads, length, max(1, TOKENS // length), backend, device="cuda")
        )
        for name, heads in HEADS.items()
        for length in LENGTHS
        for backend in ("flash", "cudnn", "efficient")
        if backend != "efficient" or length <= 8192
    }
    return {"products": products, "grouped": grouped, "attention": attended}


def attention(
    queries: int,
    keys: int,
    wide: int,
    values: int,
    length: int,
    rows: int,
    backend: str,
    *,
    device: str,
) -> dict[str, float]:
    """Causal attention, of shapes as in HEADS."""
    flops = 2.0 * rows * queries * length * length * (wide + values) / 2
    q = _random(rows, queries, length, wide, device=device)
    k = _random(rows, keys, length, wide, device=device)
    v = _random(rows, keys, length, values, device=device)
    attend = partial(
        functional.scaled_dot_product_attention,
        *(q, k, v),
        is_causal=True,
        enable_gqa=queries != keys,
    )
    with sdpa_kernel(BACKENDS[backend]):
        return _forward_backward(attend, [q, k, v], flops, 2.5 * flops)


def product(rows: int, depth: int, columns: int, *, device: str) -> dict[str, float]:
    with torch.no_grad():
        x, w = _random(rows, depth, device=device), _random(columns, depth, device=device)
        return {"tflops": 2e-12 * rows * depth * columns / _seconds(partial(torch.mm, x, w.t()), x)}


def product_fp8(
    rows: int, depth: int, columns: int, *, rowwise: bool, device: str
) -> dict[str, float]:
    """The product alone: what scales and casts is cast_to_fp8's."""
    with torch.no_grad():
        x = _random(rows, depth, device=device).to(torch.float8_e4m3fn)
        w = _random(columns, depth, device=device).to(torch.float8_e4m3fn)
        multiply = partial(
            torch._scaled_mm,
            *(x, w.t()),
            scale_a=torch.ones((rows, 1) if rowwise else (), device=device),
            scale_b=torch.ones((1, columns) if rowwise else (), device=device),
            out_dtype=torch.bfloat16,
            use_fast_accum=rowwise,
        )
        return {"tflops": 2e-12 * rows * depth * columns / _seconds(multiply, x)}


def cast_to_fp8(rows: int, depth: int, columns: int, *, device: str) -> dict[str, float]:
    """GB/s of the bf16 operand, scaled by its largest entry and cast, in PyTorch's own kernels."""
    del columns
    x = _random(rows, depth, device=device).detach()

    def cast() -> Tensor:
        return (x * (448.0 / x.abs().amax().float())).to(torch.float8_e4m3fn)

    return {"gb_per_second": x.nbytes / _seconds(cast, x) / 1e9}


def grouped_products(
    experts: int, rows: int, depth: int, columns: int, *, device: str
) -> dict[str, float]:
    flops = 2.0 * rows * depth * columns
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    x, w = _random(rows, depth, device=device), _random(experts, depth, columns, device=device)
    return _forward_backward(partial(torch._grouped_mm, x, w, offs=ends), [x, w], flops, 2 * flops)


def one_product(
    experts: int, rows: int, depth: int, columns: int, *, device: str
) -> dict[str, float]:
    """The same rows through one matrix, beside grouped_products."""
    del experts
    flops = 2.0 * rows * depth * columns
    x, w = _random(rows, depth, device=device), _random(depth, columns, device=device)
    return _forward_backward(partial(torch.mm, x, w), [x, w], flops, 2 * flops)


def _forward_backward(
    forward: Callable[[], Tensor], inputs: list[Tensor], flops: float, backward_flops: float
) -> dict[str, float]:
    with torch.no_grad():
        ahead = _seconds(forward, inputs[0])
    output = forward()
    gradient = torch.randn_like(output)
    back = _seconds(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True), inputs[0]
    )
    return {"forward_tflops": flops / ahead / 1e12, "backward_tflops": backward_flops / back / 1e12}


def _seconds(work: Callable[[], object], operand: Tensor) -> float:
    """The median of one call (s), after warm-ups, the device being waited for around each."""
    for _ in range(WARM_UPS):
        work()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < SECONDS:
        times.append(_gpu_seconds(work) if operand.is_cuda else _cpu_seconds(work))
    return sorted(times)[len(times) // 2]


def _gpu_seconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()


def _or_why(measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    try:
        return {key: round(value, 1) for key, value in measure().items()}
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return {"why": " ".join(str(error).split())[:200] or type(error).__name__}
    finally:
        torch.cuda.empty_cache()
