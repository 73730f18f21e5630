"""From what was timed to the constants that stand for it: cost/constants.json's names, by the cost
model's own formulas, so that the model says of the samples what they took."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from shardwright.cluster.cluster_types import Cluster
from shardwright.cost import kernel_seconds
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.kernel_seconds import Device, product_seconds
from shardwright.cost.layer_times import peak_flops
from shardwright.recipe.literal_types import Precision
from shardwright.recipe.measurements import MeasuredValue, TimingSample
from shardwright.recipe.recipe_types import ELEMENT_BYTES

LEAST_OVERLAP = 0.01
STEPS = 41
"""Values that a search on a line tries, each time around the best of the last ones."""


def device_of(cluster: Cluster, precision: Precision, c: Constants) -> Device:
    return kernel_seconds.device_of(
        cluster.gpu, peak_flops(cluster.gpu, precision), ELEMENT_BYTES[precision], c
    )


def fit_constants(
    cluster: Cluster, precision: Precision, samples: Sequence[TimingSample]
) -> dict[str, MeasuredValue]:
    """Only what the samples tell of. Each with the repeats behind it, and the spread of its
    samples."""
    c, found = default_constants(), {}

    def take(name: str, of: Sequence[TimingSample], value: float | None) -> None:
        nonlocal c
        if value is None or not of or not (math.isfinite(value) and value > 0):
            return
        n, spread = sum(s.seconds.n for s in of), statistics.median(s.seconds.spread for s in of)
        found[name] = MeasuredValue(value=value, n=n, spread=spread)
        c = dataclasses.replace(c, **{name: value})

    def those(what: str) -> list[TimingSample]:
        return [sample for sample in samples if sample.what == what]

    hbm = cluster.gpu.hbm_bytes_per_second
    take(
        "memory_efficiency",
        those("traffic"),
        _median(s.sizes["bytes"] / s.seconds.value / hbm for s in those("traffic")),
    )
    for name, value in _products(device_of(cluster, precision, c), c, those("product")).items():
        take(name, those("product"), value)
    take(
        "fused_attention_efficiency",
        those("attention"),
        _attention(cluster, precision, c, those("attention")),
    )
    optimizer = _median(s.seconds.value / s.sizes["parameters"] for s in those("optimizer"))
    take(
        "optimizer_traffic_bytes",
        those("optimizer"),
        optimizer and optimizer * hbm * c.memory_efficiency,
    )
    host = _median(s.seconds.value for s in those("host floor"))
    take("launch_seconds", those("host floor"), host and host / c.kernels_per_layer("auto"))
    copies = _median(s.sizes["bytes"] / s.seconds.value for s in those("pinned copy"))
    take("host_link_bytes_per_second", those("pinned copy"), copies)
    adam = _median(
        30 * s.sizes["parameters"] * cluster.gpus_per_node / s.seconds.value
        for s in those("cpu adam")
    )
    take("host_bytes_per_second", those("cpu adam"), adam)
    for name, value in _links(cluster, those("all-reduce")).items():
        take(name, those("all-reduce"), value)
    for name in (
        field.name for field in dataclasses.fields(Constants) if field.name.startswith("overlap")
    ):
        take(name, those("overlap"), _overlap(those("overlap")))
    return found


def _median(values: object) -> float | None:
    listed = list(values)  # type: ignore[call-overload]
    return statistics.median(listed) if listed else None


def _products(device: Device, c: Constants, samples: Sequence[TimingSample]) -> dict[str, float]:
    """gemm_efficiency and tile_seconds: those that are off by least, as logarithms, over all the
    products."""
    if not samples:
        return {}

    def off(efficiency: float, tile: float) -> float:
        tried = dataclasses.replace(c, gemm_efficiency=efficiency, tile_seconds=tile)
        return sum(
            abs(
                math.log(
                    product_seconds(device, tried, m=s.sizes["m"], n=s.sizes["n"], k=s.sizes["k"])
                    / s.seconds.value
                )
            )
            for s in samples
        )

    efficiency, tile = c.gemm_efficiency, c.tile_seconds
    for reach in (30.0, 4.0, 1.5, 1.1):
        efficiency = least(lambda e: off(e, tile), efficiency, reach)  # noqa: B023
        tile = least(lambda t: off(efficiency, t), tile, reach)  # noqa: B023
    return {"gemm_efficiency": efficiency, "tile_seconds": tile}


def least(of: Callable[[float], float], around: float, reach: float) -> float:
    """The value between around / reach and around x reach for which `of` is least."""
    tried = [around * math.pow(reach, 2 * i / (STEPS - 1) - 1) for i in range(STEPS)]
    return min(tried, key=of)


def _attention(
    cluster: Cluster, precision: Precision, c: Constants, samples: Sequence[TimingSample]
) -> float | None:
    """What the exponentials leave of the time, at the longest rows that were timed: there the
    products are the most."""
    if not samples:
        return None
    peak = peak_flops(cluster.gpu, precision)
    longest = max(s.sizes["length"] for s in samples)
    found = []
    for s in samples:
        heads, width, length = s.sizes["heads"], s.sizes["head_dim"], s.sizes["length"]
        if length * 4 < longest:
            continue
        softmax = (
            heads
            * length**2
            * c.softmax_unit_seconds
            / cluster.gpu.compute_units
            / cluster.gpu.softmax_gain
        )
        left = s.seconds.value - softmax
        rate = 4 * heads * length**2 * width / max(left, 0.1 * s.seconds.value)
        found.append(rate / peak / cluster.gpu.fused_attention_gain)
    return statistics.median(found)


def _links(cluster: Cluster, samples: Sequence[TimingSample]) -> dict[str, float]:
    """Start of a ring's step and share of the bandwidth, by least errors: inside a node, and with
    these between nodes."""
    inside = [s for s in samples if s.sizes["ranks"] <= s.sizes["ranks_per_node"]]
    across = [s for s in samples if s.sizes["ranks"] > s.sizes["ranks_per_node"]]
    found: dict[str, float] = {}
    for rows, where, rate in (
        (inside, "intra_node", cluster.intra_node_bytes_per_second),
        (across, "inter_node", cluster.inter_node_bytes_per_second),
    ):
        points = [_ring(s) for s in rows]
        if len({moved for _, moved, _ in points}) < 2:
            continue
        hop, a_byte = line(points)
        found[f"{where}_hop_seconds"] = max(hop, 1e-8)
        if a_byte > 0:
            found[f"{where}_efficiency"] = 1 / (a_byte * rate)
    return found


def _ring(s: TimingSample) -> tuple[float, float, float]:
    """(steps, bytes past a rank, seconds) of an all-reduce; over nodes each adapter carries its
    share."""
    n, inside = s.sizes["ranks"], s.sizes["ranks_per_node"]
    lanes = inside if n > inside else 1
    steps = -(-n // inside) if n > inside else n - 1
    return 2.0 * steps, 2 * (n - 1) / n * s.sizes["bytes"] / lanes, s.seconds.value


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a x + b y with the least sum of errors as logarithms, neither below 0:
    one point that was disturbed moves it little. It goes through two of the points, or through one
    with a or b at 0."""

    def off(found: tuple[float, float]) -> float:
        a, b = found
        return sum(abs(math.log(max(a * x + b * y, 1e-12) / z)) for x, y, z in points)

    tried = [(z / x, 0.0) for x, _, z in points if x] + [(0.0, z / y) for _, y, z in points if y]
    for (x, y, z), (u, v, w) in itertools.combinations(points, 2):
        if determinant := x * v - u * y:
            tried.append(((z * v - w * y) / determinant, (x * w - u * z) / determinant))
    return min((each for each in tried if min(each) >= 0), key=off)


def _overlap(samples: Sequence[TimingSample]) -> float | None:
    """sizes: nanoseconds of the compute alone and of the collective alone; seconds: of both
    together."""
    found = []
    for s in samples:
        compute, comm = s.sizes["compute_ns"] / 1e9, s.sizes["comm_ns"] / 1e9
        hidden = (compute + comm - s.seconds.value) / min(compute, comm)
        found.append(min(1.0, max(LEAST_OVERLAP, hidden)))
    return statistics.median(found) if found else None
