"""How a thing is timed: again and again until its time is up, and what is made of the seconds.

The median, as a step of a run is the sum of many such things and its median near the sum of theirs.
Other work on the machine moves it less than the mean; how far the quartiles lie apart says how
quiet it was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from shardwright.recipe.measurements import MeasuredValue

FEWEST, MOST = 3, 50
"""Repeats of one thing, after one that is not counted."""
Clock = Callable[[], float]


def median_figure(seconds: Sequence[float], scale: float = 1.0) -> MeasuredValue:
    """The median. scale: of the value."""
    ordered = sorted(seconds)
    if len(ordered) == 1:
        return MeasuredValue(value=ordered[0] * scale, n=1, spread=0.0)
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return MeasuredValue(
        value=middle * scale, n=len(ordered), spread=(high - low) / middle if middle > 0 else 0.0
    )


def time_repeatedly(
    run: Callable[[], Sequence[float]],
    budget_seconds: float,
    *,
    fewest: int = FEWEST,
    now: Clock = time.monotonic,
) -> list[list[float]]:
    """run: once through, giving the seconds of each of its parts. Returns the seconds by part. At
    least `fewest` times, however long that takes."""
    run()
    ends = now() + budget_seconds
    rows: list[list[float]] = []
    while len(rows) < fewest or (now() < ends and len(rows) < MOST):
        rows.append(list(run()))
    return [list(part) for part in zip(*rows, strict=True)]


def pooled(each: Sequence[Sequence[float]]) -> list[float]:
    """Of several processes that timed the same thing at the same time."""
    return [seconds for one in each for seconds in one]


class Deadline:
    """Shares out what is left. now: seconds that only grow."""

    def __init__(self, seconds: float, now: Clock = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - self._now())

    def share(self, things: int) -> float:
        """For the next of so many."""
        return self.left / max(1, things)
