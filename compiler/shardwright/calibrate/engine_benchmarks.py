"""What the engine itself takes: whole steps of its own trainer on one rank, with one decoder layer
and with two, one micro-batch and three, of rows so short that little else is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from shardwright.calibrate.layer_benchmarks import LayerRunner, fake_process_group
from shardwright.calibrate.measurement_job import EngineJob
from shardwright.calibrate.stopwatch import Stopwatch
from shardwright.calibrate.timing_repeats import time_repeatedly
from shardwright.engines.trainer_protocol import engine_runtime
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import load_plan

RATE = 1e-5
LAUNCHES = 10


def measure_short_layers(bench: Stopwatch, folder: Path, seconds: float) -> None:
    """The same short rows through the layers without an engine: what is not the engine's own. On a
    GPU also how long the host takes to launch a layer."""
    with fake_process_group(1) as group:
        rig = LayerRunner(folder, bench, group)
        for place, found in enumerate(
            time_repeatedly(lambda: [f + b for f, b, _ in rig.once(1, counts=False)], seconds),
        ):
            bench.keep("short layer", {"place": place}, found)
        if bench.device.type == "cuda":
            bench.keep("host floor", {"layers": 1}, [rig.launch_seconds() for _ in range(LAUNCHES)])


def measure_engine(bench: Stopwatch, job: EngineJob, seconds: float) -> None:
    """Groups of one rank exist. Each process has a copy of the folder: building a model writes into
    it."""
    for compiled in map(Path, job.folders):
        folder = compiled.with_name(f"{compiled.name}-{os.getpid()}")
        shutil.copytree(compiled, folder)
        plan = load_plan(folder)
        trainer = engine_runtime(plan).build_trainer(plan, folder)
        batch = [_micro_batch(plan) for _ in range(plan.strategy.gradient_accumulation_steps)]
        sizes = {
            "zero_stage": job.zero_stage,
            "layers": plan.boundaries[-1] - 2,
            "micro_batches": len(batch),
            "parameters": plan.model.total_parameters,
        }
        (found,) = time_repeatedly(
            lambda t=trainer, b=batch: [bench.seconds(lambda: t.step(b, RATE))],  # type: ignore[misc]
            seconds / len(job.folders),
        )
        bench.keep("engine step", sizes, found)
        del trainer
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _micro_batch(plan: Plan) -> MicroBatch:
    shape = (plan.strategy.micro_batch_size, plan.training.sequence_length)
    ids = torch.randint(3, plan.model.vocabulary_size - 1, shape)
    return MicroBatch(input_ids=ids, labels=ids.clone(), position_ids=None)
