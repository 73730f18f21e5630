"""Limits of CPU seconds that hold late in a long test run and on slow machines."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator

NOMINAL_SECONDS = 0.06
"""Tells how long _known_job took on the machine on which the limits were set."""


def _known_job() -> None:
    for number in range(10_000):
        json.loads(json.dumps({"name": str(number), "values": [number, number / 3]}))


@contextlib.contextmanager
def cpu_seconds_at_most(limit: float) -> Iterator[None]:
    """Fail where the block takes more of this process's CPU time, scaled by the machine's speed.

    What earlier tests left in memory is none of the block's: the garbage collector leaves it out.
    """
    gc.freeze()
    began = time.process_time()
    yield
    took = time.process_time() - began
    gc.unfreeze()
    began = time.process_time()
    _known_job()
    slower = max(1.0, (time.process_time() - began) / NOMINAL_SECONDS)
    assert took < limit * slower, f"{took:.2f} s of CPU, allowed {limit} s x {slower:.2f}"
