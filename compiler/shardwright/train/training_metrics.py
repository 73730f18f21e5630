"""What the run takes beside what the plan predicted: a line now and then, and run/summary.json at
the end."""

from __future__ import annotations

import resource
import statistics
from collections import deque
from pathlib import Path

import torch
from torch import distributed as dist

from shardwright.monitor.run_files import write_json
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonValue
from shardwright.utils.number_format import format_token_rate

WARM_UP_STEPS = 3
"""The first steps allocate, compile and connect; they are no measure of the others."""
FIRST_REPORT_STEP, EVERY = 10, 100
MEDIAN_WINDOW_STEPS = 1000
"""Steps whose median is the measured one: the newest."""
GIB = 2**30


class PerformanceSummary:
    """Of one attempt. Every rank has one: peak memory is the fullest rank's."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._seconds: deque[float] = deque(maxlen=MEDIAN_WINDOW_STEPS)
        self._steps_trained = 0
        self._losses: list[float] = []

    def step(self, loss: float, seconds: float) -> None:
        self._steps_trained += 1
        self._losses = [*self._losses[:1], loss]
        if self._steps_trained > WARM_UP_STEPS:
            self._seconds.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether the line is to be told now; the same on every rank."""
        return self._steps_trained == FIRST_REPORT_STEP or self._steps_trained % EVERY == 0

    def line(self) -> str:
        """A collective call."""
        peak, seconds = self._peak_bytes(), self._median()
        predicted = self._plan.predicted
        memory = f"peak memory {peak / GIB:.2f} GiB (plan {predicted.memory.peak_bytes / GIB:.2f})"
        if seconds is None:
            return memory
        reached = format_token_rate(
            self._tokens_per_second_per_gpu(seconds), is_cpu=self._plan.is_cpu
        )
        return (
            f"{seconds:.3g} s a step (plan {predicted.time.step_seconds:.3g}), {reached} "
            f"(plan {predicted.time.tokens_per_second_per_gpu:,.0f}), {memory}"
        )

    def write(self, folder: Path, status: str, step: int, attempt: int) -> None:
        """run/summary.json, by rank 0. A collective call. Values of steps are null where too few
        were trained."""
        peak, seconds = self._peak_bytes(), self._median()
        predicted = self._plan.predicted
        if dist.get_rank() != 0:
            return
        document: dict[str, JsonValue] = {
            "status": status,
            "step": step,
            "attempt": attempt,
            "steps_measured": len(self._seconds),
            "predicted": {
                "step_seconds": predicted.time.step_seconds,
                "tokens_per_second_per_gpu": predicted.time.tokens_per_second_per_gpu,
                "mfu": predicted.time.mfu,
                "peak_bytes": predicted.memory.peak_bytes,
            },
            "measured": {
                "step_seconds": seconds,
                "tokens_per_second_per_gpu": None
                if seconds is None
                else self._tokens_per_second_per_gpu(seconds),
                "mfu": None
                if seconds is None
                else predicted.time.mfu * predicted.time.step_seconds / seconds,
                "peak_bytes": peak,
            },
            "loss": dict(zip(("first", "last"), self._losses, strict=False)),
        }
        write_json(folder / "run" / "summary.json", document)

    def _median(self) -> float | None:
        return statistics.median(self._seconds) if self._seconds else None

    def _tokens_per_second_per_gpu(self, seconds: float) -> float:
        training = self._plan.training
        return (
            training.global_batch_size
            * training.sequence_length
            / seconds
            / self._plan.strategy.world_size
        )

    def _peak_bytes(self) -> int:
        peak = torch.tensor(
            [float(_peak_device_bytes(self._device))], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak.item())


def _peak_device_bytes(device: torch.device) -> int:
    """Bytes: on a GPU what nvidia-smi shows of it now and the allocator's peak beyond what it holds
    now; on a CPU the process's largest resident set."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info(device)
    return (
        total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    )
