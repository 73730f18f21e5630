"""Compare the run with the plan's predictions, in the log and in run/summary.json; stop a diverged
run."""

from __future__ import annotations

import math
import resource
import statistics
from collections import deque
from pathlib import Path

import torch
from torch import distributed as dist

from shardwright.diagnostics import refusal
from shardwright.layout.formats import FORMATS
from shardwright.monitor.run_files import write_json
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import JsonValue
from shardwright.utils.number_format import format_token_rate

# A run whose loss is not finite any more trains nothing: it is warned about at the first such loss,
# and ended after some in a row.
#
# Every rank has the same losses (they are sums over all ranks), so all end in the same step. A step
# that fp16's loss scaler skips does not count: its loss is finite, its scaled gradient overflowed.


class NonfiniteLossGuard:
    """Warn about non-finite losses and end the run after too many in a row.

    finite: the last step's loss was finite
    """

    def __init__(self, plan: Plan) -> None:
        self._limit = plan.training.stop_after_nonfinite
        self._scaled = FORMATS[plan.training.precision].scales_loss
        self._consecutive_nonfinite = 0
        self._warned_codes: set[str] = set()
        self.finite = True

    def step(self, step: int, loss: float, grad_norm: float) -> list[str]:
        """Return warnings, each code once a run. Raises Refusal: SW6311."""
        self.finite = math.isfinite(loss)
        self._consecutive_nonfinite = 0 if self.finite else self._consecutive_nonfinite + 1
        n = self._consecutive_nonfinite
        if 0 < self._limit <= n:
            steps = f"steps {step - n + 1} to {step}" if n > 1 else f"step {step}"
            raise refusal(
                "SW6311",
                f"the loss is not finite in {steps} (last: {loss}): training stopped "
                f"(training.stop_after_nonfinite: {self._limit})",
                "Lower training.optimizer.lr, lengthen the warm-up, set precision: bf16, or remove "
                "the samples that cause the loss; then compile again. `shardwright run` continues "
                "from the newest checkpoint with a finite loss.",
            )
        if not self.finite:
            after = (
                f"the run ends after {self._limit} in a row" if self._limit else "the run continues"
            )
            return self._warn_once(
                "SW6310",
                f"step {step}: the loss is {loss}; {after} (training.stop_after_nonfinite)",
            )
        if not math.isfinite(grad_norm) and not self._scaled:
            return self._warn_once(
                "SW6312",
                f"step {step}: the gradient norm is {grad_norm}, and the loss is {loss:.4f}",
            )
        return []

    def _warn_once(self, code: str, message: str) -> list[str]:
        if code in self._warned_codes:
            return []
        self._warned_codes.add(code)
        return [f"warning[{code}]: {message}"]


WARM_UP_STEPS = 3
"""Counts the first steps, which allocate, compile and connect, and are not measured."""
FIRST_REPORT_STEP, EVERY = 10, 100
MEDIAN_WINDOW_STEPS = 1000
"""Counts the newest steps whose median is the measured step time."""
GIB = 2**30


class PerformanceSummary:
    """Measure one attempt on every rank; peak memory is the peak-memory rank's."""

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
        """Return whether the line is to be printed now; the same on every rank."""
        return self._steps_trained == FIRST_REPORT_STEP or self._steps_trained % EVERY == 0

    def line(self) -> str:
        """Return the log line. Collective."""
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
        """Write run/summary.json on rank 0; values of steps are null where too few were trained.
        Collective."""
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
        tokens = self._plan.training.tokens_per_step
        return tokens / seconds / self._plan.strategy.world_size

    def _peak_bytes(self) -> int:
        peak = torch.tensor(
            [float(_peak_device_bytes(self._device))], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak.item())


def _peak_device_bytes(device: torch.device) -> int:
    """Return bytes: on a GPU what nvidia-smi shows, at the allocator's peak; on a CPU the largest
    RSS."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info(device)
    return (
        total - free + torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    )
