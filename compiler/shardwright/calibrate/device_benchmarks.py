"""Time kernels and collectives on the device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist

from shardwright.calibrate.calibration_file import Deadline, time_repeatedly
from shardwright.calibrate.measurement_job import Job, Timing
from shardwright.parallel.model_loading import DTYPES


class Stopwatch:
    """Time one process's work.

    timed: results so far.
    skipped: what could not be measured.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device("cpu" if job.is_cpu else f"cuda:{torch.cuda.current_device()}")
        self.timed: list[Timing] = []
        self.skipped: list[str] = []
        self.deadline = Deadline(job.seconds)

    def now(self) -> float:
        """Return the time once the device is idle; on a CPU with one thread, the process's CPU
        time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self.job.uses_cpu_time else time.perf_counter()

    def seconds(self, run: Callable[[], object]) -> float:
        began = self.now()
        run()
        return self.now() - began

    def time(
        self, what: str, sizes: dict[str, int], run: Callable[[], object], budget: float
    ) -> float:
        """Time a case, and return the least seconds."""
        (seconds,) = time_repeatedly(lambda: [self.seconds(run)], budget)
        self.keep(what, sizes, seconds)
        return min(seconds)

    def keep(self, what: str, sizes: dict[str, int], seconds: Sequence[float]) -> None:
        self.timed.append(Timing(what=what, sizes=sizes, seconds=tuple(seconds)))

    def attempt(self, what: str, run: Callable[[], None]) -> None:
        """Run a case; where the machine lacks memory or a kernel, skip only this case."""
        try:
            run()
        except Exception as error:  # torch, transformers and engines may raise anything
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            self.skipped.append(f"{what}: {type(error).__name__}: {cause}")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


# Kernels: matrix products, attention, memory traffic, Adam, and copies between host and GPU.


TRAFFIC_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}
"""Larger than every cache."""
ADAM_PARAMETERS = {"cpu": 4_000_000, "cuda": 100_000_000}
HOST_PARAMETERS = 50_000_000
COPY_BYTES = 256 * 2**20
LONGEST_CPU_SECONDS = 2.0
"""Longest attention on a CPU (s); a length that would take longer is skipped."""


def measure_kernels(bench: Stopwatch, seconds: float) -> None:
    """Time all kernels within `seconds`."""
    job, kind = bench.job, bench.device.type
    dtype = DTYPES[job.precision]
    each = seconds / 2 / max(1, len(job.products))
    for p in job.products:

        def product(m: int = p.m, n: int = p.n, k: int = p.k) -> None:
            shapes = ((m, k), (n, k))
            a, b = (torch.randn(shape, device=bench.device, dtype=dtype) for shape in shapes)
            bench.time("product", {"m": m, "n": n, "k": k}, lambda: F.linear(a, b), each)

        bench.attempt(f"product {p.m} x {p.k} x {p.n}", product)
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


def _attention(bench: Stopwatch, dtype: torch.dtype, budget: float) -> None:
    """Time fused causal attention, forward. A CPU uses one head, and stops before a length that
    would take too long."""
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
    """Time a += b: two reads and a write."""
    a, b = (torch.zeros(size // 4, device=bench.device) for _ in range(2))
    bench.time("traffic", {"bytes": 3 * size}, lambda: a.add_(b), budget)


def _adam(
    bench: Stopwatch, what: str, parameters: int, device: torch.device, budget: float
) -> None:
    """Time torch's fused Adam on fp32 masters; the engines' own optimizers have the same memory
    traffic."""
    weight = torch.nn.Parameter(torch.zeros(parameters, device=device))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    bench.time(what, {"parameters": parameters}, optimizer.step, budget)


def _copies(bench: Stopwatch, budget: float) -> None:
    """Time copies from pinned memory to the device, and back."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=bench.device)
    for run in (
        lambda: there.copy_(host, non_blocking=True),
        lambda: host.copy_(there, non_blocking=True),
    ):
        bench.time("pinned copy", {"bytes": COPY_BYTES}, run, budget / 2)


# Collectives over groups of ranks, by size, and how much of one overlaps with compute. A collective
# is timed by what it adds to ranks that compute: in training, ranks arrive at different times and
# caches hold other data.


SIZES = {"cpu": (4096, 65_536, 1 << 20, 1 << 23), "cuda": (4096, 65_536, 1 << 20, 1 << 24, 1 << 28)}
LEAST, MOST = 4, 30
OVERLAPPED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
PRODUCT = {"cpu": 384, "cuda": 4096}
"""Rows of the square matrices multiplied between collectives."""
BETWEEN, IN_A_ROW = 2, 4
"""Products before a collective; collectives timed at once."""
LEAST_SECONDS = 1e-7


def group_sizes(ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the group sizes to time: powers of two, a full node, and all ranks."""
    powers = [2**i for i in range(1, 12) if 2**i <= ranks]
    return tuple(sorted({*powers, *(n for n in (ranks_per_node, ranks) if n > 1)}))


def measure_collectives(bench: Stopwatch, rendezvous_file: Path, seconds: float) -> None:
    """Time all-reduces; every rank makes the same calls, and rank 0 decides when a size is done.

    rendezvous_file: created here; ranks meet through it, as a free port might be taken by the
        engine.
    """
    job, kind, rank = bench.job, bench.device.type, int(os.environ["RANK"])
    timeout = timedelta(seconds=120 + 4 * seconds)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(
        backend, f"file://{rendezvous_file}", timeout=timeout, rank=rank, world_size=job.ranks
    )
    sizes = group_sizes(job.ranks, job.ranks_per_node)
    deadline, left = Deadline(seconds), len(sizes) * len(SIZES[kind]) + 1
    for ranks in sizes:
        group = dist.new_group(list(range(ranks)))
        for size in SIZES[kind]:
            tensor = torch.zeros(size // 4, device=bench.device)
            timings = _timed(bench, deadline.share(left), tensor, group, member=rank < ranks)
            left -= 1
            if rank == 0:
                where = {"bytes": size, "ranks": ranks, "ranks_per_node": job.ranks_per_node}
                bench.keep("all-reduce", where, timings)
    _overlap(bench)
    dist.barrier()
    dist.destroy_process_group()


def _timed(
    bench: Stopwatch,
    budget: float,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    member: bool,
) -> list[float]:
    """Return the seconds that one collective adds to the compute before it, averaged over the
    group's ranks.

    Every rank runs as many repeats as rank 0 decides.
    """
    computing: list[float] = []
    together: list[float] = []
    ends = time.monotonic() + budget
    repeat = torch.ones(1, device=bench.device)
    compute = _products(bench, BETWEEN)
    while repeat.item():
        if member:
            dist.barrier(group=group)
            began = _wall(bench)
            for _ in range(IN_A_ROW):
                compute()
            halfway = _wall(bench)
            for _ in range(IN_A_ROW):
                compute()
                dist.all_reduce(tensor, group=group)
            computing.append((halfway - began) / IN_A_ROW)
            together.append((_wall(bench) - halfway) / IN_A_ROW)
        repeat.fill_(len(together) <= LEAST or (time.monotonic() < ends and len(together) <= MOST))
        dist.broadcast(repeat, src=0)
    if not member:
        return []
    means = torch.tensor([computing[1:], together[1:]], dtype=torch.float64, device=bench.device)
    dist.all_reduce(means, group=group)
    alone, both = (means / dist.get_world_size(group)).tolist()
    undisturbed = statistics.quantiles(alone, n=4, method="inclusive")[0]
    return [max(LEAST_SECONDS, seconds - undisturbed) for seconds in both]


def _products(bench: Stopwatch, count: int) -> Callable[[], None]:
    rows = PRODUCT[bench.device.type]
    a = torch.randn(rows, rows, device=bench.device)

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return compute


def _wall(bench: Stopwatch) -> float:
    """Return wall time: a rank that waits for another uses no CPU time."""
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
    return time.perf_counter()


def _overlap(bench: Stopwatch) -> None:
    kind = bench.device.type
    products = _products(bench, 8)
    tensor = torch.zeros(OVERLAPPED_BYTES[kind] // 4, device=bench.device)

    def both(compute: bool, comm: bool) -> float:
        dist.barrier()
        began = _wall(bench)
        work = dist.all_reduce(tensor, async_op=True) if comm else None
        if compute:
            products()
        if work is not None:
            work.wait()
        return _wall(bench) - began

    rows = [[both(True, False), both(False, True), both(True, True)] for _ in range(LEAST + 1)][1:]
    compute, comm, together = (sorted(row[i] for row in rows) for i in range(3))
    middle = len(rows) // 2
    sizes = {"compute_ns": round(compute[middle] * 1e9), "comm_ns": round(comm[middle] * 1e9)}
    if int(os.environ["RANK"]) == 0:
        bench.keep("overlap", sizes, together)
