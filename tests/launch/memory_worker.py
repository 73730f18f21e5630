"""One rank of pipeline 2 x tensor 2, without the others: the peak of its own memory while it builds
its part.

Usage: memory_worker.py FOLDER RANK; prints JSON. Pages of mapped files are not counted: the kernel
takes them back.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.engines.deepspeed.pipeline_module import build_pipeline
from shardwright.parallel.expert_parallel import ExpertSharder
from shardwright.parallel.model_loading import conv1d_to_linear, open_model
from shardwright.parallel.weight_files import WeightFiles
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import read_plan


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.001)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    plan = read_plan(folder)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.strategy.world_size),
    }
    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=plan.strategy.world_size, store=FakeStore()
    )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="fake", dist_init_required=False, auto_mpi_discovery=False
    )
    before = anonymous_bytes()
    peak = Peak()
    model, weights = open_model(plan, folder, resumes=False)
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}

    def no_loss(*_: Any) -> torch.Tensor:
        raise AssertionError("no step is trained")

    filler = WeightLoader(model, weights, splits, conv1d_to_linear(model), plan.ranks[rank].tensor)
    module = build_pipeline(
        model,
        plan,
        no_loss,
        torch.device("cpu"),
        torch.float32,
        filler,
        ExpertSharder(model),
    )
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    assert isinstance(weights, WeightFiles)
    print(json.dumps({"held": held, "peak": peak.bytes - before, "read": weights.read_bytes}))


if __name__ == "__main__":
    main()
