"""Measure how far two results differ, for `verify`, the probes and the tests.

A difference is 0 or more. It is infinite where nothing can be compared: NaN on either side, an
infinity, or a value, weight or shape that the other side lacks. It is never NaN, so that `max` over
differences, and `<=` against a limit, cannot lose one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def difference(actual: float | None, expected: float | None, *, relative: bool = False) -> float:
    """Return the absolute difference, or the one relative to `expected`. None stands for a value
    that is not finite, as in metrics.jsonl."""
    if (
        actual is None
        or expected is None
        or not (math.isfinite(actual) and math.isfinite(expected))
    ):
        return math.inf
    if not relative:
        return abs(actual - expected)
    if expected == 0:
        return 0.0 if actual == 0 else math.inf
    return abs(actual / expected - 1)


def largest_difference(differences: Iterable[float]) -> float:
    """The largest; also where a NaN is among them, wherever it stands."""
    return max((math.inf if math.isnan(d) else d for d in differences), default=math.inf)


def max_series_diff(
    actual: Sequence[float | None], expected: Sequence[float | None], *, relative: bool = False
) -> float:
    """Place by place, over the whole length of both."""
    if len(actual) != len(expected):
        return math.inf
    return largest_difference(
        difference(a, b, relative=relative) for a, b in zip(actual, expected, strict=True)
    )


def max_abs_diff(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two elements; 0 for tensors without elements."""
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    # Infinity minus itself is NaN, and torch's max keeps a NaN.
    return largest_difference([float((actual.detach() - expected.detach()).abs().max())])


def relative_error(
    actual: torch.Tensor, expected: torch.Tensor, *, smallest_scale: float = 0.0
) -> float:
    """Return the difference as a share of `expected`'s largest element, or of `smallest_scale`
    where that is larger."""
    off = max_abs_diff(actual, expected)
    if not 0 < off < math.inf:
        return off
    size = max(smallest_scale, float(expected.detach().abs().max()))
    return off / size if size else math.inf


def state_dict_max_abs_diff(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest difference over the tensors of both, by name."""
    if actual.keys() != expected.keys():
        return math.inf
    return largest_difference(max_abs_diff(actual[name], expected[name]) for name in expected)
