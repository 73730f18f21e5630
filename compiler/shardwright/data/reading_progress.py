"""Shows how far a long reading is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PLAIN_SECONDS = 2.0
"""Stands between one plain line and the next; what takes less than that says nothing."""


class ReadingProgress:
    """Says on stderr how many bytes of the sources are read. total: all of them; shown: False says
    nothing."""

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self.what, self.total, self.done, self.shown = what, max(1, total), 0, shown
        has_bar = shown and sys.stderr.isatty()
        self._bar = (
            tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)
            if has_bar
            else None
        )
        self._began = self._last = time.monotonic()

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        if self._bar is not None:
            self._bar.update(size_bytes)
            return
        now = time.monotonic()
        if self.shown and now - self._last >= PLAIN_SECONDS:
            self._last = now
            rate = self.done / (now - self._began)
            left = max(0.0, (self.total - self.done) / rate)
            print(
                f"{self.what}: {self.done / self.total:.0%} of {self.total / 2**20:,.0f} MiB, "
                f"{rate / 2**20:,.1f} MiB/s, {left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
