"""What large collectives reach of the links between nodes, by fabric and ranks:
collective_bandwidth.json, each with its source."""

from __future__ import annotations

import bisect
import functools
import json
import math
from importlib import resources
from typing import Literal, TypedDict

from shardwright.recipe.literal_types import Fabric

Collective = Literal["all_reduce", "all_gather"]
LARGEST_SIZE_FACTOR = 2.0  # that the size of a message changes a share by
RANKS_PER_NODE = 8  # of the measured rings


class BandwidthCurve(TypedDict):
    """Shares of the adapters' rate at so many ranks, eight a node, for messages of adapter_bytes
    over each adapter. node_weight: see bandwidth_share."""

    ranks: list[int]
    all_reduce: list[float]
    all_gather: list[float]
    adapter_bytes: float
    size_exponent: float
    node_weight: float
    source: str


@functools.cache
def fabrics() -> dict[Fabric, BandwidthCurve]:
    """Those that a curve was measured of."""
    text = (
        resources.files("shardwright.cluster")
        .joinpath("collective_bandwidth.json")
        .read_text("utf-8")
    )
    curves: dict[Fabric, BandwidthCurve] = json.loads(text)["fabrics"]
    return curves


def bandwidth_share(
    fabric: Fabric, collective: Collective, ranks: int, nodes: int, adapter_bytes: float
) -> float | None:
    """Of `ranks` ranks on so many nodes; adapter_bytes: of the message, over each adapter. None
    where no curve was measured.

    A ring of n ranks over N nodes waits n times for a rank and N times for the network. The curve's
    rings have eight ranks a node; one with fewer is read at ranks^(1 - w) x (8 N)^w, w the
    node_weight.
    """
    curve = fabrics().get(fabric)
    if curve is None:
        return None
    size = math.pow(max(1.0, adapter_bytes) / curve["adapter_bytes"], curve["size_exponent"])
    weight = curve["node_weight"]
    alike = math.pow(ranks, 1 - weight) * math.pow(RANKS_PER_NODE * nodes, weight)
    return min(
        1.0,
        _interpolated_share(fabric, collective, alike)
        * min(LARGEST_SIZE_FACTOR, max(1 / LARGEST_SIZE_FACTOR, size)),
    )


@functools.cache
def _interpolated_share(fabric: Fabric, collective: Collective, ranks: float) -> float:
    """Between two measured numbers of ranks on a line of logarithms; beyond them the nearest
    one's."""
    curve = fabrics()[fabric]
    known, shares = curve["ranks"], curve[collective]
    at = bisect.bisect_left(known, ranks)
    if at in (0, len(known)):
        return shares[min(at, len(known) - 1)]
    low, high = known[at - 1], known[at]
    part = math.log(ranks / low) / math.log(high / low)
    return shares[at - 1] * math.pow(shares[at] / shares[at - 1], part)
