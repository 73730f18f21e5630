"""Waiting for what a run does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120
) -> None:
    """Until `condition`, while `process` is alive."""

    def alive_or_met() -> bool:
        met = condition()
        assert met or process.poll() is None, "the run ended early"
        return met

    wait_until(alive_or_met, "waited too long", seconds)


def wait_until(condition: Callable[[], bool], message: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.2)
