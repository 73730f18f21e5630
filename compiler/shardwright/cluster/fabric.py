"""What large collectives reach of the links between nodes, by fabric and ranks: fabrics.json, each with its source."""

from __future__ import annotations

import bisect
import functools
import json
import math
from importlib import resources
from typing import Literal, TypedDict

from shardwright.ir.words import Fabric

Collective = Literal["all_reduce", "all_gather"]
MOST = 2.0  # that the size of a message changes a share by


class Curve(TypedDict):
    """Shares of the adapters' rate at so many ranks, for messages of message_bytes."""

    ranks: list[int]
    all_reduce: list[float]
    all_gather: list[float]
    message_bytes: float
    size_exponent: float
    source: str


@functools.cache
def fabrics() -> dict[Fabric, Curve]:
    """Those that a curve was measured of."""
    text = resources.files("shardwright.cluster").joinpath("fabrics.json").read_text("utf-8")
    curves: dict[Fabric, Curve] = json.loads(text)["fabrics"]
    return curves


def share_of_links(fabric: Fabric, collective: Collective, ranks: int, message_bytes: float) -> float | None:
    """None where no curve was measured."""
    curve = fabrics().get(fabric)
    if curve is None:
        return None
    size = math.pow(max(1.0, message_bytes) / curve["message_bytes"], curve["size_exponent"])
    return min(1.0, _share(fabric, collective, ranks) * min(MOST, max(1 / MOST, size)))


@functools.cache
def _share(fabric: Fabric, collective: Collective, ranks: int) -> float:
    """Between two measured numbers of ranks on a line of logarithms; beyond them the nearest one's."""
    curve = fabrics()[fabric]
    known, shares = curve["ranks"], curve[collective]
    at = bisect.bisect_left(known, ranks)
    if at in (0, len(known)):
        return shares[min(at, len(known) - 1)]
    low, high = known[at - 1], known[at]
    part = math.log(ranks / low) / math.log(high / low)
    return shares[at - 1] * math.pow(shares[at] / shares[at - 1], part)
