"""How far apart two results are: what `verify`, the probes and the tests compare by.

A difference is a number from 0 up, and infinite where nothing was shown: NaN on either side, an
infinity, a value, weight or shape that the other side does not have, nothing to compare at all.
Never NaN, so that `max` over differences, and `<=` against a limit, cannot lose one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def apart(got: float | None, wanted: float | None, *, relative: bool = False) -> float:
    """None: metrics.jsonl's word for a value that is not finite. relative: to `wanted`."""
    if got is None or wanted is None or not (math.isfinite(got) and math.isfinite(wanted)):
        return math.inf
    if not relative:
        return abs(got - wanted)
    if wanted == 0:
        return 0.0 if got == 0 else math.inf
    return abs(got / wanted - 1)


def worst(differences: Iterable[float]) -> float:
    """The largest; also where a NaN is among them, wherever it stands."""
    return max((math.inf if math.isnan(d) else d for d in differences), default=math.inf)


def series_apart(
    got: Sequence[float | None], wanted: Sequence[float | None], *, relative: bool = False
) -> float:
    """Place by place, over the whole length of both."""
    if len(got) != len(wanted):
        return math.inf
    return worst(apart(a, b, relative=relative) for a, b in zip(got, wanted, strict=True))


def tensor_apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Over the elements; tensors without any are the same."""
    if got.shape != wanted.shape:
        return math.inf
    if not got.numel():
        return 0.0
    # Infinity minus itself is NaN, and torch's max keeps a NaN.
    return worst([float((got.detach() - wanted.detach()).abs().max())])


def share_apart(got: torch.Tensor, wanted: torch.Tensor, *, least: float = 0.0) -> float:
    """As a share of `wanted`'s largest element, or of `least` where that is larger."""
    off = tensor_apart(got, wanted)
    if not 0 < off < math.inf:
        return off
    size = max(least, float(wanted.detach().abs().max()))
    return off / size if size else math.inf


def weights_apart(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Over the tensors of both, by name."""
    if got.keys() != wanted.keys():
        return math.inf
    return worst(tensor_apart(got[name], wanted[name]) for name in wanted)
