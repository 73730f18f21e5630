"""Measure in one process: `python -m shardwright.calibrate.calibration_process FOLDER`, with RANK
and the like in its environment.

Measurements without communication come first, on all processes at once, so that they share memory
and clock as ranks do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.calibrate.measurement_job import Job, ProcessResult, cpu_name
from shardwright.utils.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from shardwright.calibrate.device_benchmarks import Stopwatch

SHARES = {"layers": 0.4, "engine": 0.45, "kernels": 0.6}
"""Shares of the remaining time when each starts, the most important first; the collectives take the
rest."""


def main(folder: Path) -> int:
    job, rank = Job.read(folder), int(os.environ["RANK"])
    if job.is_cpu:
        keep_freed_memory()  # as on the ranks of a run
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    torch.set_num_threads(job.threads)
    if not job.is_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    from shardwright.calibrate.device_benchmarks import Stopwatch

    bench = Stopwatch(job)
    measure(bench, folder / "meeting")
    ProcessResult(
        device=device_name(job), timed=tuple(bench.timed), skipped=tuple(bench.skipped)
    ).write(folder, rank)
    return 0


def measure(bench: Stopwatch, rendezvous_file: Path) -> None:
    """Run all measurements.

    rendezvous_file: see measure_collectives.
    """
    from shardwright.calibrate.device_benchmarks import measure_collectives, measure_kernels
    from shardwright.calibrate.layer_benchmarks import measure_layers

    job = bench.job
    budget = SHARES["layers"] * bench.deadline.left / max(1, len(job.layers))
    for layer in job.layers:
        what = f"layers at tensor {layer.tensor}"
        bench.attempt(what, lambda j=layer: measure_layers(bench, j, budget))  # type: ignore[misc]
    if job.engine:
        bench.attempt(
            "engine",
            lambda: _engine(bench, SHARES["engine"] * bench.deadline.left / (len(job.engine) + 1)),
        )
    measure_kernels(bench, SHARES["kernels"] * bench.deadline.left)
    if job.ranks > 1:
        bench.attempt(
            "collectives", lambda: measure_collectives(bench, rendezvous_file, bench.deadline.left)
        )


def _engine(bench: Stopwatch, budget: float) -> None:
    """Measure the engine, each job with its own budget; its process groups hold this process
    alone."""
    from shardwright.calibrate.layer_benchmarks import measure_engine, measure_short_layers
    from shardwright.engines.trainer_protocol import engine_runtime
    from shardwright.plan.plan import load_plan

    jobs = bench.job.engine
    measure_short_layers(bench, Path(jobs[0].folders[-1]), budget)
    plan = load_plan(Path(jobs[0].folders[0]))
    runtime = engine_runtime(plan)
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # chosen as it listens, so no other process takes it in between
    }
    with _environment(alone):
        runtime.prepare_process(plan, user_training_loop=False)
        runtime.open_groups(plan)
        for job in jobs:
            what = f"the engine at ZeRO-{job.zero_stage}"
            bench.attempt(what, lambda j=job: measure_engine(bench, j, budget))  # type: ignore[misc]
        runtime.close_groups()


@contextmanager
def _environment(changed: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def device_name(job: Job) -> str:
    if not job.is_cpu:
        import torch

        return str(torch.cuda.get_device_name())
    return cpu_name()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
