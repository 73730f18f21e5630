"""`python -m tools.bench_gloo`: milliseconds of gloo's collectives over 2 and 4 ranks of this
machine.

Writes benchmarks/gloo.json, which cost/collective_seconds.py speaks of.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tools.prove.proof_results import stamp

FILE = Path(__file__).parents[1] / "benchmarks" / "gloo.json"
NUMEL = 1 << 22
REPEATS = 25


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    whole, piece = torch.ones(NUMEL), torch.ones(NUMEL // ranks)
    found = {
        "all_reduce": _milliseconds(lambda: dist.all_reduce(whole)),
        "reduce_scatter": _milliseconds(lambda: dist.reduce_scatter_tensor(piece, whole)),
        "all_gather": _milliseconds(lambda: dist.all_gather_into_tensor(whole, piece)),
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _milliseconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(1000 * median(seconds), 1)


def main() -> None:
    found = {}
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank, args=(ranks, folder), nprocs=ranks)
            found[f"{ranks} ranks"] = json.loads(
                Path(folder, "found.json").read_text(encoding="utf-8")
            )
    document = {
        **stamp(),
        "command": "python -m tools.bench_gloo",
        "cores": os.cpu_count(),
        "megabytes": round(4 * NUMEL / 1e6, 1),
        "milliseconds": found,
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
