"""Measure `memory_copy_gbytes_per_second` of cost/goodput.json: two ranks write a file to /dev/shm
with its SHA-256 and exchange it through gloo, as checkpoint/memory_copies.py does. The time is the
rank's own CPU time, so other work on the machine does not count: each rank of a host has a core.

python -m tools.bench_memory_copies
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_manifest import checksum
from shardwright.checkpoint.checkpoint_saver import save_safetensors
from shardwright.checkpoint.memory_copies import exchange_files
from shardwright.utils.child_processes import free_port

BYTES, REPEATS = 512 * 2**20, 5


def measure(rank: int, port: int, root: str, found: multiprocessing.Queue[list[float]]) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.set_num_threads(1)
    values = torch.rand(BYTES // 4)
    rates = []
    for repeat in range(REPEATS):
        folder = Path(root) / f"{rank}-{repeat}"
        folder.mkdir()
        dist.barrier()
        began = time.process_time()
        path = folder / f"rank-{rank}.safetensors"
        save_safetensors({"fp32/x": values}, path)
        own = [(path.name, path.stat().st_size, checksum(path))]
        everyone: list[list[tuple[str, int, str]]] = [[], []]
        dist.all_gather_object(everyone, own)
        other = 1 - rank
        wrong = exchange_files(folder, own, other, everyone[other], other, None)
        assert not wrong, wrong
        rates.append(BYTES / (time.process_time() - began) / 1e9)
        for each in folder.iterdir():
            each.unlink()
    if rank == 0:
        found.put(rates)
    dist.destroy_process_group()


def main() -> int:
    context = multiprocessing.get_context("spawn")
    found, port = context.Queue(), free_port()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        ranks = [context.Process(target=measure, args=(rank, port, root, found)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        rates = found.get(timeout=300)
        for rank in ranks:
            rank.join()
    print(f"{statistics.median(rates):.2f} GB/s per rank, median of {len(rates)}: {rates}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
