"""Rank 0's progress: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType

from tqdm import tqdm

from shardwright.monitor.run_files import number

PLAIN_SECONDS = 2.0
"""At most one plain line in this time, the first and the last step always."""


class TrainingProgress:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar = (
            tqdm(total=steps, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None
        )
        self._last = 0.0

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, text: str) -> None:
        """text: one line of metrics.jsonl."""
        m = json.loads(text)
        figures = (
            f"loss {number(m['loss']):.4f}  grad_norm {number(m['grad_norm']):.3f}  lr "
            f"{m['learning_rate']:.2e}  {m['tokens_per_second']:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.n = m["step"]
            self._bar.set_postfix_str(figures)
            return
        now = time.monotonic()
        if m["step"] in (1, self.steps) or now - self._last >= PLAIN_SECONDS:
            self._last = now
            print(f"step {m['step']}/{self.steps}  {figures}", flush=True)

    def note(self, line: str) -> None:
        """A line of rank 0's own output."""
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)
