"""Look up the share of link bandwidth that large collectives reach, by fabric and ranks.

The measured curves and their sources are in collective_bandwidth.json.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from importlib import resources
from typing import Literal, TypedDict

from shardwright.recipe.literal_types import Fabric

Collective = Literal["all_reduce", "all_gather"]
LARGEST_SIZE_FACTOR = 2.0  # limits how far a message's size changes the share
RANKS_PER_NODE = 8  # in the measured rings


class BandwidthCurve(TypedDict):
    """Hold the measured shares of the adapters' rate, with eight ranks a node.

    ranks: numbers of ranks that were measured
    all_reduce, all_gather: share at each number of ranks
    adapter_bytes: bytes of the measured messages over each adapter
    size_exponent: exponent of the share's change with message size
    node_weight: see bandwidth_share
    """

    ranks: list[int]
    all_reduce: list[float]
    all_gather: list[float]
    adapter_bytes: float
    size_exponent: float
    node_weight: float
    source: str


@functools.cache
def fabrics() -> dict[Fabric, BandwidthCurve]:
    """Return the measured curve of each fabric."""
    text = (
        resources.files("shardwright.cost").joinpath("collective_bandwidth.json").read_text("utf-8")
    )
    curves: dict[Fabric, BandwidthCurve] = json.loads(text)["fabrics"]
    return curves


def bandwidth_share(
    fabric: Fabric, collective: Collective, ranks: int, nodes: int, adapter_bytes: float
) -> float | None:
    """Return the share of the adapters' rate that a collective reaches, or None without a curve.

    A ring of n ranks over N nodes waits n times for a rank and N times for the network. The
    measured rings have eight ranks a node; a ring with fewer is read at ranks^(1 - w) x (8 N)^w,
    with w the node_weight.

    ranks, nodes: of the collective
    adapter_bytes: bytes of the message over each adapter
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
    """Interpolate between measured numbers of ranks on a logarithmic scale; clamp at the ends."""
    curve = fabrics()[fabric]
    known, shares = curve["ranks"], curve[collective]
    at = bisect.bisect_left(known, ranks)
    if at in (0, len(known)):
        return shares[min(at, len(known) - 1)]
    low, high = known[at - 1], known[at]
    part = math.log(ranks / low) / math.log(high / low)
    return shares[at - 1] * math.pow(shares[at] / shares[at - 1], part)
