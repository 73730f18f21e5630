"""Collectives over groups of ranks, by size, and how much of one hides behind computing.

A collective is timed by what it adds to ranks that compute, as in training: they do not arrive at
the same time, the data is in another cache, and ranks that share a core have to be woken.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from shardwright.calibrate.stopwatch import Stopwatch
from shardwright.calibrate.timing_repeats import Deadline

SIZES = {"cpu": (4096, 65_536, 1 << 20, 1 << 23), "cuda": (4096, 65_536, 1 << 20, 1 << 24, 1 << 28)}
LEAST, MOST = 4, 30
OVERLAPPED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 27}
PRODUCT = {"cpu": 384, "cuda": 4096}
"""Rows of the square matrices that are multiplied between collectives."""
BETWEEN, IN_A_ROW = 2, 4
"""Products before a collective; collectives that are timed at once."""
LEAST_SECONDS = 1e-7


def group_sizes(ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Of groups that are timed: powers of two, a whole node, and all."""
    powers = [2**i for i in range(1, 12) if 2**i <= ranks]
    return tuple(sorted({*powers, *(n for n in (ranks_per_node, ranks) if n > 1)}))


def measure_collectives(bench: Stopwatch, rendezvous_file: Path, seconds: float) -> None:
    """Every rank makes the same calls. The rank with most seconds decides when a size is done, so
    that nobody is left alone in a collective.

    meeting: a file, made here, through which the ranks of this machine find one another. A port
    that was free when the ranks started may since be one of the engine's hundred.
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
            found = _timed(bench, deadline.share(left), tensor, group, member=rank < ranks)
            left -= 1
            if rank == 0:
                where = {"bytes": size, "ranks": ranks, "ranks_per_node": job.ranks_per_node}
                bench.keep("all-reduce", where, found)
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
    """Seconds that one collective adds to the computing before it, the mean over the group's ranks.
    As many repeats on every rank: rank 0 says whether there is another."""
    computing: list[float] = []
    together: list[float] = []
    ends = time.monotonic() + budget
    again = torch.ones(1, device=bench.device)
    compute = _products(bench, BETWEEN)
    while again.item():
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
        again.fill_(len(together) <= LEAST or (time.monotonic() < ends and len(together) <= MOST))
        dist.broadcast(again, src=0)
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
    """A rank that waits for another uses no time of its own."""
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
