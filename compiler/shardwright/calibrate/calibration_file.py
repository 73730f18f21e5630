"""Turn timings into the measurements file that a recipe names."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from shardwright.calibrate.measurement_job import ProcessResult
from shardwright.cost import kernel_seconds
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.kernel_seconds import Device, fused_attention_seconds, product_seconds
from shardwright.cost.layer_times import peak_flops
from shardwright.engines.run_profiles import KernelProfile
from shardwright.layout.formats import element_bytes
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import CHECKPOINTING, Precision
from shardwright.recipe.measurements import (
    KIND,
    VERSION,
    EngineMeasurement,
    LayerMeasurement,
    MeasuredMachine,
    MeasuredValue,
    Measurements,
    TimingSample,
)

# Timing: repeat until the budget is used, and take the median, which other work on the machine
# moves less than the mean. The quartiles' distance tells how quiet the machine was.


FEWEST, MOST = 3, 50
"""Repeats of one case, after one that is not counted."""
Clock = Callable[[], float]


def median_figure(seconds: Sequence[float], scale: float = 1.0) -> MeasuredValue:
    """Return the median times `scale`, with its spread."""
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
    """Repeat `run` within the budget, at least `fewest` times; return the seconds by part.

    run: returns the seconds of each part.
    """
    run()
    ends = now() + budget_seconds
    rows: list[list[float]] = []
    while len(rows) < fewest or (now() < ends and len(rows) < MOST):
        rows.append(list(run()))
    return [list(part) for part in zip(*rows, strict=True)]


def pooled(each: Sequence[Sequence[float]]) -> list[float]:
    """Pool the seconds of several processes that timed the same case at once."""
    return [seconds for one in each for seconds in one]


class Deadline:
    """Share out the remaining time.

    now: a monotonic clock (s).
    """

    def __init__(self, seconds: float, now: Clock = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - self._now())

    def share(self, things: int) -> float:
        """Return the time for the next of `things` cases."""
        return self.left / max(1, things)


# Fitting constants of cost/constants.json to the timings with the cost model's own formulas, so
# that the model reproduces the samples.


LEAST_OVERLAP = 0.01
STEPS = 41
"""Values tried by one line search, each time around the last best."""


def device_of(cluster: Cluster, precision: Precision, c: Constants) -> Device:
    return kernel_seconds.device_of(
        cluster.gpu, peak_flops(cluster.gpu, precision), element_bytes(precision), c
    )


def fit_constants(
    cluster: Cluster, precision: Precision, samples: Sequence[TimingSample]
) -> dict[str, MeasuredValue]:
    """Fit the constants that the samples determine, each with its repeats and its samples'
    spread."""
    c, fitted = default_constants(), {}

    def take(name: str, of: Sequence[TimingSample], value: float | None) -> None:
        nonlocal c
        if value is None or not of or not (math.isfinite(value) and value > 0):
            return
        n, spread = sum(s.seconds.n for s in of), statistics.median(s.seconds.spread for s in of)
        fitted[name] = MeasuredValue(value=value, n=n, spread=spread)
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
    launches = c.of_family("kernels_per_layer", KernelProfile().family)
    take("launch_seconds", those("host floor"), host and host / launches)
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
    return fitted


def _median(values: object) -> float | None:
    listed = list(values)  # type: ignore[call-overload]
    return statistics.median(listed) if listed else None


def _products(device: Device, c: Constants, samples: Sequence[TimingSample]) -> dict[str, float]:
    """Return gemm_efficiency and tile_seconds with the least sum of log errors over all
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
    """Return the value between around / reach and around x reach that minimizes `of`."""
    tried = [around * math.pow(reach, 2 * i / (STEPS - 1) - 1) for i in range(STEPS)]
    return min(tried, key=of)


def _attention(
    cluster: Cluster, precision: Precision, c: Constants, samples: Sequence[TimingSample]
) -> float | None:
    """Fit the rate of attention at the longest sequences, over the rate of its library."""
    if not samples:
        return None
    device = device_of(cluster, precision, c)
    unit = dataclasses.replace(c, fused_attention_efficiency=1.0)
    longest = max(s.sizes["length"] for s in samples)
    rates = []
    for s in samples:
        heads, width, length = s.sizes["heads"], s.sizes["head_dim"], s.sizes["length"]
        if length * 4 < longest:
            continue
        flops = 4 * heads * length**2 * width
        expected, _ = fused_attention_seconds(
            device, unit, flops=flops, head_dim=int(width), length=int(length)
        )
        rates.append(expected / s.seconds.value)
    return statistics.median(rates)


def _links(cluster: Cluster, samples: Sequence[TimingSample]) -> dict[str, float]:
    """Fit a ring step's latency and the share of the bandwidth, inside a node and between nodes."""
    inside = [s for s in samples if s.sizes["ranks"] <= s.sizes["ranks_per_node"]]
    across = [s for s in samples if s.sizes["ranks"] > s.sizes["ranks_per_node"]]
    fitted: dict[str, float] = {}
    for rows, where, rate in (
        (inside, "intra_node", cluster.intra_node_bytes_per_second),
        (across, "inter_node", cluster.inter_node_bytes_per_second),
    ):
        points = [_ring(s) for s in rows]
        if len({moved for _, moved, _ in points}) < 2:
            continue
        hop, a_byte = line(points)
        fitted[f"{where}_hop_seconds"] = max(hop, 1e-8)
        if a_byte > 0:
            fitted[f"{where}_efficiency"] = 1 / (a_byte * rate)
    return fitted


def _ring(s: TimingSample) -> tuple[float, float, float]:
    """Return (steps, bytes through a rank, seconds) of an all-reduce; across nodes each adapter
    carries its share."""
    n, inside = s.sizes["ranks"], s.sizes["ranks_per_node"]
    lanes = inside if n > inside else 1
    steps = -(-n // inside) if n > inside else n - 1
    return 2.0 * steps, 2 * (n - 1) / n * s.sizes["bytes"] / lanes, s.seconds.value


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit seconds = a x + b y with the least sum of log errors and a, b >= 0, robust against
    outliers.

    The line goes through two of the points, or through one with a or b at 0.
    """

    def off(coefficients: tuple[float, float]) -> float:
        a, b = coefficients
        return sum(abs(math.log(max(a * x + b * y, 1e-12) / z)) for x, y, z in points)

    tried = [(z / x, 0.0) for x, _, z in points if x] + [(0.0, z / y) for _, y, z in points if y]
    for (x, y, z), (u, v, w) in itertools.combinations(points, 2):
        if determinant := x * v - u * y:
            tried.append(((z * v - w * y) / determinant, (x * w - u * z) / determinant))
    return min((each for each in tried if min(each) >= 0), key=off)


def _overlap(samples: Sequence[TimingSample]) -> float | None:
    """Return the median share of a collective that overlaps with compute.

    sizes: nanoseconds of each alone; seconds: of both together.
    """
    shares = []
    for s in samples:
        compute, comm = s.sizes["compute_ns"] / 1e9, s.sizes["comm_ns"] / 1e9
        hidden = (compute + comm - s.seconds.value) / min(compute, comm)
        shares.append(min(1.0, max(LEAST_OVERLAP, hidden)))
    return statistics.median(shares) if shares else None


SHOWN = (
    "product",
    "attention",
    "traffic",
    "optimizer",
    "cpu adam",
    "pinned copy",
    "all-reduce",
    "overlap",
    "host floor",
)
"""Samples that constants are fitted to or checked with."""


def measurements(
    problem: Problem, machine: MeasuredMachine, results: Sequence[ProcessResult]
) -> Measurements:
    rows = samples(results)
    shown = tuple(row for row in rows if row.what in SHOWN)
    return Measurements(
        kind=KIND,
        version=VERSION,
        machine=machine,
        model=problem.graph.config_hash,
        target=problem.recipe.target,
        sequence_length=problem.recipe.training.sequence_length,
        constants=fit_constants(problem.cluster, machine.precision, shown),
        layers=tuple(_layers(rows)),
        engine=tuple(_engine(rows)),
        samples=shown,
        runs=(),
    )


def samples(results: Sequence[ProcessResult]) -> list[TimingSample]:
    """Pool the repeats of all processes."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[float, ...]]] = {}
    for one in results:
        for timed in one.timed:
            found.setdefault((timed.what, tuple(timed.sizes.items())), []).append(timed.seconds)
    return [
        TimingSample(what=what, sizes=dict(sizes), seconds=median_figure(pooled(each)))
        for (what, sizes), each in found.items()
    ]


def _layers(rows: Sequence[TimingSample]) -> Iterable[LayerMeasurement]:
    """Yield the measurement of each layer, tensor degree, micro-batch and checkpointing mode."""

    def by(part: str) -> dict[tuple[int, ...], MeasuredValue]:
        return {
            tuple(row.sizes.values()): row.seconds for row in rows if row.what == f"layer {part}"
        }

    for checkpointing in CHECKPOINTING:
        backward, kept = by(f"backward {checkpointing}"), by(f"bytes {checkpointing}")
        for where, forward in by(f"forward {checkpointing}").items():
            if forward.value > 0:
                place, tensor, micro_batch = where
                yield LayerMeasurement(
                    place=place,
                    tensor=tensor,
                    micro_batch_size=micro_batch,
                    activation_checkpointing=checkpointing,
                    forward_seconds=forward,
                    backward_seconds=backward[where],
                    kept_bytes=kept[where],
                )


def _engine(rows: Sequence[TimingSample]) -> Iterable[EngineMeasurement]:
    """Yield the engine's own time by ZeRO stage, from steps with one and two layers, one and
    several micro-batches."""
    steps = [row for row in rows if row.what == "engine step"]
    short = {row.sizes["place"]: row.seconds.value for row in rows if row.what == "short layer"}
    for stage in sorted({row.sizes["zero_stage"] for row in steps}):
        mine = {
            (row.sizes["layers"], row.sizes["micro_batches"]): row
            for row in steps
            if row.sizes["zero_stage"] == stage
        }
        if len(mine) != 4 or not short:
            continue
        few, many = sorted({m for _, m in mine})
        a_micro_batch = {
            layers: (mine[layers, many].seconds.value - mine[layers, few].seconds.value)
            / (many - few)
            for layers in (1, 2)
        }
        a_step = {n: mine[n, few].seconds.value - few * a_micro_batch[n] for n in (1, 2)}
        own_layer, ends = short.get(1, 0.0), short[0] + short[max(short)]
        layer = max(0.0, a_micro_batch[2] - a_micro_batch[1] - own_layer)
        sizes = [mine[n, few].sizes["parameters"] for n in (1, 2)]
        parameter = max(0.0, a_step[2] - a_step[1]) / max(1, sizes[1] - sizes[0])
        n, spread = (
            min(r.seconds.n for r in mine.values()),
            max(r.seconds.spread for r in mine.values()),
        )

        def results(value: float, n: int = n, spread: float = spread) -> MeasuredValue:
            return MeasuredValue(value=max(0.0, value), n=n, spread=spread)

        yield EngineMeasurement(
            zero_stage=stage,
            micro_batch_seconds=results(a_micro_batch[1] - own_layer - ends - layer),
            layer_seconds=results(layer),
            step_seconds=results(a_step[1] - parameter * sizes[0]),
            parameter_seconds=results(parameter),
        )
