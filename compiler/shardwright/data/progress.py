"""How far a long reading is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PLAIN_SECONDS = 2.0
"""From one plain line to the next; what takes less than that says nothing."""


class ReadingProgress:
    """total: bytes of the sources."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, max(1, total), 0
        self._bar = (
            tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True) if sys.stderr.isatty() else None
        )
        self._began = self._last = time.monotonic()

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        if self._bar is not None:
            self._bar.update(size_bytes)
            return
        now = time.monotonic()
        if now - self._last >= PLAIN_SECONDS:
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
