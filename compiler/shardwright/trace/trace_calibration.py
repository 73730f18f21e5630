"""Correct the cost model with a profiled step: the file that `cluster.measured` names.

Each constant is fitted to the line of the step that it decides, with the cost model's own formulas,
so that the plan's line becomes the measured one. What remains of the whole step is the layout's own
run, which scales every other layout's step by its factor.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright import __version__
from shardwright.cost.calibrated_costs import calibration_for
from shardwright.cost.cost_constants import Constants
from shardwright.cost.layer_times import KernelSeconds, kernel_seconds
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.cost.step_time import estimate_time, optimizer_seconds
from shardwright.diagnostics import refusal
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.measurements import (
    KIND,
    VERSION,
    MeasuredMachine,
    MeasuredValue,
    Measurements,
    RunMeasurement,
)
from shardwright.trace.kernel_classes import LINE_LABELS, Line
from shardwright.trace.memory_snapshot import MemoryPeak
from shardwright.trace.plan_comparison import PredictedStep
from shardwright.trace.rank_comparison import (
    busy_seconds,
    expected_seconds,
    group_of_call,
    match_collectives,
)
from shardwright.trace.step_trace import CollectiveCall, RankTrace

ROUNDS, STEPS = 3, 12
REACH = 20.0
"""Bounds how far a constant may move from its present value, as a factor."""
CLOSE = 0.03
"""A fitted line may differ from the measured one by this share; else its constant stays."""
LEAST_SECONDS = 1e-5
LEAST_MESSAGE_BYTES = 2**20
"""Smaller collectives tell of latency, not of a link's rate."""
LEAST_OVERLAP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedConstant:
    """Hold a constant of cost/constants.json before and after, and the line that corrected it."""

    name: str
    before: float
    after: float
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCalibration:
    """Hold the measurements, and how they came about.

    step_before, step_after: the plan's predicted step of this layout, seconds
    skipped: what could not be corrected, and why
    """

    measurements: Measurements
    constants: tuple[CorrectedConstant, ...]
    step_before: float
    step_after: float
    skipped: tuple[str, ...]


class _Fit:
    """Fits constants one after the other."""

    def __init__(self, priced: PricedLayout, ranks: Sequence[int]) -> None:
        self._start, self._ranks = priced, ranks
        self.constants = priced.constants
        self.corrected: dict[str, str] = {}
        self.skipped: list[str] = []

    def priced(self, constants: Constants | None = None) -> PricedLayout:
        start = self._start
        layout = build_priced_layout(start.problem, start.strategy, constants or self.constants)
        return with_boundaries(layout, start.boundaries)

    def kernels(self, constants: Constants | None = None) -> KernelSeconds | None:
        """Return the mean kernel seconds of a step on the traced pipeline ranks."""
        priced = self.priced(constants)
        each = [kernel_seconds(priced, rank) for rank in self._ranks]
        known = [kernels for kernels in each if kernels is not None]
        if len(known) < len(each):
            return None
        m = priced.strategy.gradient_accumulation_steps
        total = known[0]
        for kernels in known[1:]:
            total += kernels
        sums = total.products + total.attention + total.memory_bound + total.host
        return total.scaled_to(sums * m / len(known))

    def match(
        self,
        names: dict[str, int],
        measured: float,
        line_seconds: Callable[[Constants], float],
        label: str,
    ) -> None:
        """Move constants until a line's predicted seconds are the measured ones.

        names: each constant's exponent: 1 where the seconds grow with it, -1 where they fall
        """
        first, tried = self.constants, self.constants
        factor = 1.0
        for _ in range(STEPS):
            seconds = line_seconds(tried)
            if seconds <= 0:
                break
            factor = min(REACH, max(1 / REACH, factor * measured / seconds))
            tried = dataclasses.replace(
                first, **{name: getattr(first, name) * factor**way for name, way in names.items()}
            )
        if abs(line_seconds(tried) - measured) <= CLOSE * measured:
            self.constants = tried
            self.corrected |= dict.fromkeys(names, label)
        else:
            self.skipped.append(f"{label}: no value of {', '.join(names)} gives its seconds")

    def set(self, name: str, value: float, label: str) -> None:
        self.constants = dataclasses.replace(self.constants, **{name: value})
        self.corrected[name] = label


def calibrate_from_trace(
    problem: Problem,
    priced: PricedLayout,
    predicted: PredictedStep,
    traces: Sequence[RankTrace],
    peak: MemoryPeak | None,
) -> TraceCalibration:
    """Correct the constants that the traces' lines decide, and record the layout's run.

    Raises Refusal with SW3317 where the traces correct nothing.
    """
    fit = _Fit(priced, predicted.ranks)
    _fit_links(fit, priced, traces)
    _fit_kernels(fit, traces)
    if not priced.cluster.gpu.is_cpu:
        _fit_host(fit, priced, traces)
    _fit_overlap(fit, priced, traces)
    run, before = None, estimate_time(priced).step_seconds
    after = estimate_time(fit.priced()).step_seconds
    whole = all(trace.has_optimizer for trace in traces)
    if whole:
        run = _run(priced, traces, peak, after)
    else:
        fit.skipped.append("the whole step: the trace has no optimizer step")
    if not fit.corrected and run is None:
        raise refusal(
            "SW3317",
            f"{traces[0].file!r} corrects no figure of the plan: " + "; ".join(fit.skipped),
            "Profile a whole step of this recipe's run, with its optimizer.",
        )
    return TraceCalibration(
        measurements=_measurements(problem, traces, fit, run),
        constants=tuple(
            CorrectedConstant(
                name=name,
                before=getattr(priced.constants, name),
                after=getattr(fit.constants, name),
                because=label,
            )
            for name, label in fit.corrected.items()
        ),
        step_before=before,
        step_after=after if run is None else run.step_seconds.value,
        skipped=tuple(dict.fromkeys(fit.skipped)),
    )


def _measured(traces: Sequence[RankTrace], line: Line) -> float:
    return statistics.fmean(trace.lines[line].seconds for trace in traces)


def _fit_kernels(fit: _Fit, traces: Sequence[RankTrace]) -> None:
    if fit.kernels() is None:
        fit.skipped.append("kernels: assume.mfu prices all of them as one")
        return

    def part(name: str) -> Callable[[Constants], float]:
        return lambda constants: float(getattr(fit.kernels(constants), name))

    def optimizer(constants: Constants) -> float:
        priced = fit.priced(constants)
        return statistics.fmean(optimizer_seconds(priced, rank) for rank in fit._ranks)

    # Memory's rate first: it bounds some products, and the optimizer.
    table: tuple[tuple[Line, dict[str, int], Callable[[Constants], float]], ...] = (
        ("memory_bound", {"memory_efficiency": -1}, part("memory_bound")),
        ("matrix_products", {"gemm_efficiency": -1}, part("products")),
        (
            "attention",
            {"fused_attention_efficiency": -1},
            part("attention"),
        ),
        ("optimizer", {"optimizer_traffic_bytes": 1}, optimizer),
    )
    unmeasured = optimizer(fit.constants)
    for _ in range(ROUNDS):
        fit.skipped = [text for text in fit.skipped if text.partition(":")[0] not in _LABELS]
        for line, names, seconds in table:
            measured = _measured(traces, line)
            if measured > LEAST_SECONDS and seconds(fit.constants) > 0:
                fit.match(names, measured, seconds, LINE_LABELS[line])
    if not _measured(traces, "optimizer") and "memory_efficiency" in fit.corrected:
        # The rate of other kernels tells nothing of the optimizer's: its seconds stay.
        label = "optimizer, whose seconds stay"
        fit.match({"optimizer_traffic_bytes": 1}, unmeasured, optimizer, label)


_LABELS = set(LINE_LABELS.values())


def _fit_host(fit: _Fit, priced: PricedLayout, traces: Sequence[RankTrace]) -> None:
    """Fit a micro-batch's own time to the idle line. In a pipeline a stage waits for its
    neighbours, too, which no line tells apart."""
    if priced.strategy.pipeline > 1:
        fit.skipped.append("idle (host): in a pipeline a stage waits for its neighbours, too")
        return
    kernels = fit.kernels()
    if kernels is None:
        return
    m = priced.strategy.gradient_accumulation_steps
    more = (_measured(traces, "idle") - kernels.host) / m
    value = fit.constants.micro_batch_seconds + more
    if value > LEAST_SECONDS:
        fit.set("micro_batch_seconds", value, LINE_LABELS["idle"])
    else:
        fit.skipped.append("idle (host): a layer's launches alone are priced longer")


def transfers(traces: Sequence[RankTrace]) -> list[CollectiveCall]:
    """Return the calls that tell of a link's rate: those of the rank that came last, of large
    messages. One rank's file alone does not tell the transfer from the wait before it."""
    return [
        one.transfer
        for one in match_collectives(traces)
        if (one.transfer.message_bytes or 0) >= LEAST_MESSAGE_BYTES
    ]


def _fit_links(fit: _Fit, priced: PricedLayout, traces: Sequence[RankTrace]) -> None:
    if any(trace.collectives for trace in traces) and len(traces) == 1:
        fit.skipped.append("links: one rank's file does not tell a transfer from the wait for it")
    groups: dict[str, dict[tuple[str, tuple[int, ...]], list[CollectiveCall]]] = {}
    for call in transfers(traces):
        group = group_of_call(priced, call)
        if group is not None and expected_seconds(priced, call) and call.seconds > 0:
            where = "inter_node" if group.spans_nodes else "intra_node"
            of_group = groups.setdefault(f"{where}_efficiency", {})
            of_group.setdefault((call.group, call.ranks), []).append(call)
    for name, found in groups.items():
        share = statistics.median(
            sum(expected_seconds(priced, call) or 0.0 for call in calls) / busy_seconds(calls)
            for calls in found.values()
        )
        value = getattr(fit.constants, name) * share
        if name == "inter_node_efficiency" and not _decides(fit, traces, name):
            fit.skipped.append("links between nodes: their rate is that of cluster.fabric")
            continue
        fit.set(name, value, "collectives")


def _decides(fit: _Fit, traces: Sequence[RankTrace], name: str) -> bool:
    """Return whether a constant changes what the traced collectives should take."""
    changed = fit.priced(
        dataclasses.replace(fit.constants, **{name: getattr(fit.constants, name) / 2})
    )
    calls = transfers(traces)
    return any(
        expected_seconds(changed, call) != expected_seconds(fit.priced(), call) for call in calls
    )


def _fit_overlap(fit: _Fit, priced: PricedLayout, traces: Sequence[RankTrace]) -> None:
    """Fit the share of data-parallel traffic that computing hides, where there is no other."""
    s = priced.strategy
    if s.zero_world_size == 1 or s.tensor * s.pipeline * s.context * s.expert > 1:
        return
    reducing: tuple[Line, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    hidden = {
        line: statistics.fmean(trace.overlapped_seconds(line) for trace in traces)
        for line in reducing
    }
    busy = sum(_measured(traces, line) + seconds for line, seconds in hidden.items())
    computing: tuple[Line, ...] = ("matrix_products", "attention", "memory_bound")
    compute = sum(_measured(traces, line) for line in computing)
    if busy > LEAST_SECONDS and compute > 0:
        share = sum(hidden.values()) / min(busy, compute)
        value = min(1.0, max(LEAST_OVERLAP, share))
        fit.set(f"overlap_{priced.traits.traffic}", value, "collectives")


def _run(
    priced: PricedLayout,
    traces: Sequence[RankTrace],
    peak: MemoryPeak | None,
    predicted_seconds: float,
) -> RunMeasurement:
    times = [seconds for trace in traces for seconds in trace.step_times]
    spread = 0.0
    if len(times) > 1:
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        spread = (high - low) / middle if middle else 0.0
    measured = statistics.fmean(trace.step_seconds for trace in traces)
    peaks = [trace.peak_bytes for trace in traces if trace.peak_bytes]
    peaks += [] if peak is None else [peak.reserved_bytes]
    return RunMeasurement(
        pins=priced.strategy.pins(),
        step_seconds=MeasuredValue(
            value=measured, n=sum(trace.steps for trace in traces), spread=spread
        ),
        predicted_step_seconds=predicted_seconds,
        peak_bytes=max(peaks, default=None),
    )


def _measurements(
    problem: Problem, traces: Sequence[RankTrace], fit: _Fit, run: RunMeasurement | None
) -> Measurements:
    """Return the recipe's measurements, if it has some, with these in their place."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    earlier, own = recipe.cluster.measured, calibration_for(recipe, graph)
    steps = sum(trace.steps for trace in traces)
    constants = {
        name: MeasuredValue(value=getattr(fit.constants, name), n=steps, spread=0.0)
        for name in fit.corrected
    }
    runs = [] if own is None else [one for one in own.runs if run and one.pins != run.pins]
    machine = MeasuredMachine(
        device=traces[0].device or "a CPU",
        is_cpu=cluster.gpu.is_cpu,
        cores=cluster.gpus_per_node,  # a trace counts no cores: no two ranks are taken to share one
        nodes=cluster.nodes,
        ranks=cluster.world_size,
        threads=1,
        precision=recipe.training.precision,
        versions={"shardwright": __version__},
    )
    return Measurements(
        kind=KIND,
        version=VERSION,
        machine=machine if earlier is None else earlier.found.machine,
        model=graph.config_hash,
        target=recipe.target,
        sequence_length=recipe.training.sequence_length,
        constants=({} if earlier is None else dict(earlier.found.constants)) | constants,
        layers=() if own is None else own.layers,
        engine=() if own is None else own.engine,
        samples=() if earlier is None else earlier.found.samples,
        runs=(*runs, *([] if run is None else [run])),
    )
