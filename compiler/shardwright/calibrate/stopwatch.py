"""Seconds of work on the device, and how a process keeps what it timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from shardwright.calibrate.measurement_job import Job, Timing
from shardwright.calibrate.timing_repeats import Deadline, time_repeatedly


class Stopwatch:
    """One process's. timed: what it has found so far; left_out: what it could not."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device("cpu" if job.is_cpu else f"cuda:{torch.cuda.current_device()}")
        self.timed: list[Timing] = []
        self.skipped: list[str] = []
        self.deadline = Deadline(job.seconds)

    def now(self) -> float:
        """When all that was launched is done. On a CPU with one thread the process's own time."""
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
        """The least seconds of it."""
        (found,) = time_repeatedly(lambda: [self.seconds(run)], budget)
        self.keep(what, sizes, found)
        return min(found)

    def keep(self, what: str, sizes: dict[str, int], found: Sequence[float]) -> None:
        self.timed.append(Timing(what=what, sizes=sizes, seconds=tuple(found)))

    def attempt(self, what: str, run: Callable[[], None]) -> None:
        """A thing that this machine has no memory or no kernel for costs that thing alone."""
        try:
            run()
        except Exception as error:  # whatever torch, transformers or an engine raise
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            self.skipped.append(f"{what}: {type(error).__name__}: {cause}")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
