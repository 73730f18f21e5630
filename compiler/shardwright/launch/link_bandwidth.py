"""Measures the links between hosts, and between the GPUs of one: what `doctor` holds against the
plan's assumption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import distributed

from shardwright.launch.host_probe import LinkRates

SIZES = tuple(2**n for n in range(20, 29, 2))
"""Bytes: 1 MiB to 256 MiB. Small messages measure latency."""
TRANSFERS = 3


def measure(rank: int, world: int, device: torch.device, seconds: float) -> LinkRates:
    """Bytes per second, None where there is nothing to measure. A collective call: every rank makes
    it.

    to_next: one way to rank + 1 (the last rank's to the first). all_reduce: the bus bandwidth, 2 (n
    - 1) / n x bytes / time, which a ring makes independent of n (NCCL's performance notes). local:
    from this host's first GPU to its second. seconds: larger messages are left out where they would
    take longer than this in all.
    """
    end = time.monotonic() + seconds

    def reduce(size: int) -> None:
        distributed.all_reduce(torch.zeros(size // 4, dtype=torch.float32, device=device))

    def copy(size: int) -> None:
        torch.empty(size, dtype=torch.uint8, device=device).to("cuda:1")

    to_next = _to_next(rank, world, device, end) if world > 1 else None
    reduced = _largest(reduce, device, end) if world > 1 else None
    all_reduce = None if reduced is None else reduced * 2 * (world - 1) / world
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    local = _largest(copy, device, end, alone=True) if several else None
    return LinkRates(to_next=to_next, all_reduce=all_reduce, local=local)


def _to_next(rank: int, world: int, device: torch.device, end: float) -> float | None:
    """Pairs take turns, so that no host sends and receives at once: even ranks send, then odd ones.
    Of an odd number of ranks the last sends alone."""
    turns: list[list[int]] = [list(range(0, world - 1, 2)), list(range(1, world - 1, 2))]
    if world % 2:
        turns.append([world - 1])
    else:
        turns[1].append(world - 1)
    mine: float | None = None
    for senders in turns:

        def transfer(size: int, senders: list[int] = senders) -> None:
            message = torch.empty(size, dtype=torch.uint8, device=device)
            if rank in senders:
                distributed.send(message, (rank + 1) % world)
            elif (rank - 1) % world in senders:
                distributed.recv(message, (rank - 1) % world)

        rate = _largest(transfer, device, end)
        if rank in senders:
            mine = rate
    return mine


def _largest(
    run: Callable[[int], object], device: torch.device, end: float, *, alone: bool = False
) -> float | None:
    """Bytes per second at the largest size that there is time for; all ranks go on or stop
    together."""
    rate = None
    for size in SIZES:
        run(size)  # the first opens connections
        _wait_for(device)
        best = math.inf
        for _ in range(TRANSFERS):
            began = time.perf_counter()
            run(size)
            _wait_for(device)
            best = min(best, max(time.perf_counter() - began, 1e-9))
        rate = size / best
        left = end - time.monotonic() - (SIZES[1] // SIZES[0]) * (TRANSFERS + 1) * best
        if not alone:
            least = torch.tensor([left], device=device)
            distributed.all_reduce(least, distributed.ReduceOp.MIN)
            left = float(least.item())
        if left < 0:
            break
    return rate


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
