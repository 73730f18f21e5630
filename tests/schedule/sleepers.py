"""DeepSpeed's own pipeline engines on this machine's CPU, with stages that sleep: `python -m
tests.schedule.sleepers`.

Reads a JSON list of cases from a file and writes the seconds of each, measured on the slowest rank.
Sleeping ranks overlap truly however few the cores, so ratios of steps are sound where a stage takes
100 ms or more a micro-batch. One engine a schedule serves all cases: each makes gloo groups whose
threads poll, and slow down what is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import ops
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import nn

from tests.schedule.sleep import Sleep

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    "steps_per_print": 1_000_000_000,
}


class SleepingStage(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.forward_seconds, self.backward_seconds = stage, 0.0, 0.0
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep: Callable[..., torch.Tensor] = Sleep.apply
        return sleep(x * self.scale, self)


def build(schedule: str, ranks: int, micro_batches: int) -> Any:
    """An engine whose stage s is one layer, whatever it stands for."""
    stages = 2 * ranks if schedule == "dualpipev" else ranks
    kind = DualPipeVModule if schedule == "dualpipev" else PipelineModule
    module = kind(
        layers=[LayerSpec(SleepingStage, stage) for stage in range(stages)],
        num_stages=ranks,
        loss_fn=lambda out, _: out.mean(),
        partition_method="uniform",
    )
    config = CONFIG | {"gradient_accumulation_steps": micro_batches}
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )
    return engine


def measure(engine: Any, case: dict[str, Any]) -> float:
    """Seconds of one step, from a barrier to the end of the slowest rank's."""
    for layer in engine.module.modules():
        if isinstance(layer, SleepingStage):
            layer.forward_seconds = case["forward_seconds"][layer.stage]
            layer.backward_seconds = case["backward_seconds"][layer.stage]
    engine.micro_batches = case["micro_batches"]
    sample = torch.zeros(1, 8)
    data = iter([(sample, sample)] * case["micro_batches"])
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(data_iter=data)
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run_rank(rank: int, ranks: int, port: int, cases: list[dict[str, Any]], out: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a JIT build that nothing here calls
    deepspeed.init_distributed(
        dist_backend="gloo", dist_init_required=True, auto_mpi_discovery=False
    )
    made: dict[frozenset[int], Any] = {}
    new_group = torch.distributed.new_group

    def cached(ranks: Any = None, *args: Any, **keywords: Any) -> Any:
        key = frozenset(ranks or ())
        if key not in made:
            made[key] = new_group(ranks, *args, **keywords)
        return made[key]

    torch.distributed.new_group = cached
    engines: dict[str, Any] = {}
    seconds = []
    for case in cases:
        schedule = case["schedule"]
        if schedule not in engines:
            engines[schedule] = build(schedule, ranks, 2 * ranks)
            # The first step exchanges shapes.
            stages = [0.0] * (2 * ranks)
            measure(
                engines[schedule],
                {"micro_batches": 2 * ranks, "forward_seconds": stages, "backward_seconds": stages},
            )
        seconds.append(measure(engines[schedule], case))
        if rank == 0:
            out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main(ranks: int, port: int, file: Path, out: Path) -> int:
    """Forked ranks share one import of torch and DeepSpeed."""
    cases = json.loads(file.read_text())
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(r, ranks, port, cases, out)) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])))
