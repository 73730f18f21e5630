"""A run whose loss is no finite number any more trains nothing: said at the first such loss, ended
after some in a row.

Every rank has the same losses (they are sums over all ranks), so that all come to the same end in
the same step. A step that fp16's loss scaler skips counts for nothing: its loss is a number, only
its scaled gradient overflowed.
"""

from __future__ import annotations

import math

from shardwright.diagnostics import Refusal, refusal
from shardwright.plan.plan import Plan


class NonfiniteLossGuard:
    """finite: whether the loss of the last step was."""

    def __init__(self, plan: Plan) -> None:
        self._limit = plan.training.stop_after_nonfinite
        self._scaled = plan.training.precision == "fp16"
        self._consecutive_nonfinite = 0
        self._warned_codes: set[str] = set()
        self.finite = True

    def step(self, step: int, loss: float, grad_norm: float) -> list[str]:
        """Warnings, each once a run. Raises Refusal: SW6311."""
        self.finite = math.isfinite(loss)
        self._consecutive_nonfinite = 0 if self.finite else self._consecutive_nonfinite + 1
        if 0 < self._limit <= self._consecutive_nonfinite:
            raise self._nonfinite_refusal(step, loss)
        if not self.finite:
            after = (
                f"the run ends after {self._limit} in a row"
                if self._limit
                else "the run goes on all the same"
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

    def _nonfinite_refusal(self, step: int, loss: float) -> Refusal:
        n = self._consecutive_nonfinite
        steps = f"steps {step - n + 1} to {step}" if n > 1 else f"step {step}"
        return refusal(
            "SW6311",
            f"the loss is no finite number any more ({loss}, in {steps}): training ended, as "
            f"training.stop_after_nonfinite: {self._limit} says",
            "Nothing is trained by such steps. `shardwright run` goes on from the newest "
            "checkpoint with a finite loss: before that compile again with a lower "
            "training.optimizer.lr, more warm-up or precision: bf16, or look for the samples that "
            "cause it.",
        )
