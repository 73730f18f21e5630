"""Single kernels: products, attention, copies in memory, Adam, and copies between the host and its
GPU."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from shardwright.calibrate.stopwatch import Stopwatch
from shardwright.parallel.torch_dtypes import DTYPES

TRAFFIC_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}
"""Beyond every cache."""
ADAM_PARAMETERS = {"cpu": 4_000_000, "cuda": 100_000_000}
HOST_PARAMETERS = 50_000_000
COPY_BYTES = 256 * 2**20
LONGEST_CPU_SECONDS = 2.0
"""Of one attention on a CPU; a length that would take longer is not begun."""


def measure_kernels(bench: Stopwatch, seconds: float) -> None:
    """seconds: for all of them."""
    job, kind = bench.job, bench.device.type
    dtype = DTYPES[job.precision]
    each = seconds / 2 / max(1, len(job.products))
    for p in job.products:
        bench.attempt(
            f"product {p.m} x {p.k} x {p.n}",
            partial(_product, bench, p.m, p.n, p.k, dtype, each),
        )
    bench.attempt("attention", lambda: _attention(bench, dtype, seconds / 4))
    bench.attempt("memory traffic", lambda: _traffic(bench, TRAFFIC_BYTES[kind], seconds / 12))
    bench.attempt(
        "optimizer",
        lambda: _adam(bench, "optimizer", ADAM_PARAMETERS[kind], bench.device, seconds / 12),
    )
    if kind == "cuda":
        bench.attempt(
            "CPU-Adam",
            lambda: _adam(bench, "cpu adam", HOST_PARAMETERS, torch.device("cpu"), seconds / 12),
        )
        bench.attempt("pinned copies", lambda: _copies(bench, seconds / 12))


def _product(bench: Stopwatch, m: int, n: int, k: int, dtype: torch.dtype, budget: float) -> None:
    a, b = (torch.randn(shape, device=bench.device, dtype=dtype) for shape in ((m, k), (n, k)))
    bench.time("product", {"m": m, "n": n, "k": k}, lambda: F.linear(a, b), budget)


def _attention(bench: Stopwatch, dtype: torch.dtype, budget: float) -> None:
    """Fused causal attention, forward. A CPU has one head, and stops where the next length would
    take too long."""
    is_cpu, width = bench.job.is_cpu, bench.job.head_dim
    heads = 1 if is_cpu else bench.job.heads
    for length in bench.job.attention:
        q, k, v = (
            torch.randn(1, heads, length, width, device=bench.device, dtype=dtype) for _ in range(3)
        )
        least = bench.time(
            "attention",
            {"heads": heads, "head_dim": width, "length": length},
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),  # type: ignore[misc]
            budget / len(bench.job.attention),
        )
        if is_cpu and 4 * least > min(LONGEST_CPU_SECONDS, budget):
            break


def _traffic(bench: Stopwatch, size: int, budget: float) -> None:
    """a += b: two reads and a write."""
    a, b = (torch.zeros(size // 4, device=bench.device) for _ in range(2))
    bench.time("traffic", {"bytes": 3 * size}, lambda: a.add_(b), budget)


def _adam(
    bench: Stopwatch, what: str, parameters: int, device: torch.device, budget: float
) -> None:
    """torch's fused Adam of float32 masters, for what engines have instead of it does the same on
    the same memory."""
    weight = torch.nn.Parameter(torch.zeros(parameters, device=device))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    bench.time(what, {"parameters": parameters}, optimizer.step, budget)


def _copies(bench: Stopwatch, budget: float) -> None:
    """From pinned memory to the device, and back."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=bench.device)
    for run in (
        lambda: there.copy_(host, non_blocking=True),
        lambda: host.copy_(there, non_blocking=True),
    ):
        bench.time("pinned copy", {"bytes": COPY_BYTES}, run, budget / 2)
