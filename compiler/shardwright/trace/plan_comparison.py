"""Compare a profiled step with a plan, line by line: predicted and measured seconds, and what to do
about the difference."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.cost.layer_times import kernel_seconds
from shardwright.cost.layout_costs import Breakdown, RankBreakdown, break_down
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.layout.axes import rank_coordinates
from shardwright.layout.layout_estimate import Estimate
from shardwright.trace.kernel_classes import COLLECTIVE_LINES, LINES, Line
from shardwright.trace.step_trace import RankTrace

NOTEWORTHY, NOTEWORTHY_OF_STEP = 0.1, 0.01
"""A line that differs by less than these shares of its prediction and of the step needs no
advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """Hold what the plan says of the ranks that were traced: the mean of their pipeline ranks.

    lines: exposed seconds by line, which add up to the step; None where the plan has no such figure
    message_bytes: of each kind of collective, on one rank, whole buffers
    ranks: the pipeline rank of each trace
    """

    step_seconds: float
    lines: Mapping[Line, float | None]
    message_bytes: Mapping[Line, float]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLine:
    """Compare one line; seconds are the mean of the traced ranks.

    predicted_seconds: None where the plan has no figure of its own for the line
    measured_seconds: None where the trace has no such part at all
    overlapped_seconds: measured, beside computing
    message_bytes, predicted_message_bytes: of collectives, a step and rank
    bus_gbytes_per_second: as nccl-tests counts it; None where the trace has no sizes
    advice: one sentence; "" where the two agree
    """

    line: Line
    predicted_seconds: float | None
    measured_seconds: float | None
    overlapped_seconds: float
    calls: float
    message_bytes: float | None
    predicted_message_bytes: float | None
    bus_gbytes_per_second: float | None
    longest: tuple[tuple[str, float], ...]
    advice: str

    @property
    def difference_seconds(self) -> float | None:
        if self.predicted_seconds is None or self.measured_seconds is None:
            return None
        return self.measured_seconds - self.predicted_seconds

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted seconds; None where either is absent or 0."""
        if not self.predicted_seconds or self.measured_seconds is None:
            return None
        return self.measured_seconds / self.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Hold the compared lines, what differs most first.

    predicted_seconds: of the step, without the parts that the trace does not have
    measured_seconds: the mean of the traced ranks
    """

    predicted_seconds: float
    measured_seconds: float
    lines: tuple[ComparedLine, ...]
    notes: tuple[str, ...]


def pipeline_rank_of(priced: PricedLayout, rank: int | None) -> int | None:
    """Return the pipeline rank of a global rank; None where it is unknown or not of this world."""
    s = priced.strategy
    if s.pipeline == 1:
        return 0
    if rank is None or rank >= s.world_size:
        return None
    coordinates = list(rank_coordinates(s.degrees()))
    return coordinates[rank]["pipeline"]


def predicted_step(
    priced: PricedLayout, estimate: Estimate, traces: Sequence[RankTrace]
) -> PredictedStep:
    breakdown = break_down(priced, estimate)
    ranks = tuple(
        breakdown.slowest_rank if rank is None else rank
        for rank in (pipeline_rank_of(priced, trace.rank) for trace in traces)
    )
    each = [_predicted_lines(priced, breakdown, rank) for rank in ranks]
    moved = [_message_bytes(priced, breakdown.ranks[rank]) for rank in ranks]
    lines: dict[Line, float | None] = {}
    for line in LINES:
        of_line = [one[line] for one in each]
        known = [seconds for seconds in of_line if seconds is not None]
        lines[line] = statistics.fmean(known) if len(known) == len(of_line) else None
    return PredictedStep(
        step_seconds=estimate.time.step_seconds,
        lines=lines,
        message_bytes={
            line: statistics.fmean(one.get(line, 0.0) for one in moved) for line in COLLECTIVE_LINES
        },
        ranks=ranks,
    )


def _predicted_lines(
    priced: PricedLayout, breakdown: Breakdown, rank: int
) -> dict[Line, float | None]:
    time = breakdown.ranks[rank].time
    lines: dict[Line, float | None] = dict.fromkeys(LINES, 0.0)
    computing = (
        time.forward_seconds
        + time.backward_seconds
        + time.recompute_seconds
        + time.accumulate_seconds
        + time.host_seconds
    )
    kinds = kernel_seconds(priced, rank)
    idle = time.idle_seconds + time.outer_comm_seconds
    if kinds is None:
        lines |= {"matrix_products": None, "attention": None, "memory_bound": None, "idle": None}
    else:
        kinds = kinds.scaled_to(computing)
        lines |= {
            "matrix_products": kinds.products,
            "attention": kinds.attention,
            "memory_bound": kinds.memory_bound,
            "idle": idle + kinds.host,
        }
    lines["optimizer"] = time.optimizer_seconds
    in_layers = time.tensor_forward_seconds + time.tensor_backward_seconds
    traffic = breakdown.ranks[rank].traffic
    s, reduces = priced.strategy, 2.0
    gathers_context = priced.traits.context_gathers_kv
    tensor: dict[Line, float] = {
        "all_to_all": traffic.expert_all_to_all
        + (0.0 if gathers_context else traffic.context_all_to_all),
        "all_gather": traffic.tensor_all_gather
        + (traffic.context_all_to_all if gathers_context else 0.0),
    }
    _add_reduction(tensor, traffic.tensor_all_reduce * reduces, splits=s.sequence_parallel)
    data: dict[Line, float] = {"all_gather": traffic.parameter_all_gather}
    data["all_reduce"] = traffic.tied_all_reduce  # over two ranks: a message's worth
    if s.zero_stage == 0:
        data["all_reduce"] += reduces * traffic.gradient_reduce
    else:
        data["reduce_scatter"] = traffic.gradient_reduce
    for seconds, weights in ((in_layers, tensor), (time.data_comm_seconds, data)):
        total = sum(weights.values())
        for line, weight in weights.items():
            if total:
                lines[line] = (lines[line] or 0.0) + seconds * weight / total
            elif seconds:  # nothing that is counted moves, such as the host's launches alone
                lines["idle"] = (lines["idle"] or 0.0) + seconds
                break
    lines["send_recv"] = (lines["send_recv"] or 0.0) + time.pipeline_comm_seconds
    return lines


def _add_reduction(weights: dict[Line, float], wire_bytes: float, *, splits: bool) -> None:
    """Add a tensor-parallel reduction, which sequence parallelism splits into two collectives
    (arXiv 2205.05198)."""
    if splits:
        weights["all_gather"] = weights.get("all_gather", 0.0) + wire_bytes / 2
        weights["reduce_scatter"] = wire_bytes / 2
    else:
        weights["all_reduce"] = wire_bytes


def _message_bytes(priced: PricedLayout, rank: RankBreakdown) -> dict[Line, float]:
    traffic, s = rank.traffic, priced.strategy
    gathers_context = priced.traits.context_gathers_kv
    moved: dict[Line, float] = dict.fromkeys(COLLECTIVE_LINES, 0.0)
    moved["all_to_all"] = traffic.expert_all_to_all
    moved["all_gather"] = traffic.tensor_all_gather + traffic.parameter_all_gather
    moved["all_gather" if gathers_context else "all_to_all"] += traffic.context_all_to_all
    reduced = traffic.tensor_all_reduce
    if s.sequence_parallel:
        moved["all_gather"] += reduced
        moved["reduce_scatter"] += reduced
    else:
        moved["all_reduce"] += reduced
    moved["all_reduce" if s.zero_stage == 0 else "reduce_scatter"] += traffic.gradient_reduce
    moved["all_reduce"] += traffic.tied_all_reduce
    repeats = priced.traits.repeats_orthogonalization
    moved["all_gather" if repeats else "all_reduce"] += traffic.muon_matrices
    moved["send_recv"] = 2 * traffic.pipeline_send  # as many arrive
    return moved


def compare_step(predicted: PredictedStep, traces: Sequence[RankTrace]) -> StepComparison:
    has_optimizer = any(trace.has_optimizer for trace in traces)
    lines = tuple(
        compared
        for line in LINES
        if (compared := _compared(line, predicted, traces, has_optimizer)) is not None
    )
    expected = predicted.step_seconds
    if not has_optimizer:
        expected -= predicted.lines["optimizer"] or 0.0
    return StepComparison(
        predicted_seconds=expected,
        measured_seconds=statistics.fmean(trace.step_seconds for trace in traces),
        lines=tuple(sorted(lines, key=_order)),
        notes=tuple(_notes(predicted, traces, has_optimizer)),
    )


def _order(line: ComparedLine) -> tuple[bool, float]:
    difference = line.difference_seconds
    return difference is None, -abs(difference if difference is not None else 0.0)


def _compared(
    line: Line, predicted: PredictedStep, traces: Sequence[RankTrace], has_optimizer: bool
) -> ComparedLine | None:
    expected = predicted.lines[line]
    times = [trace.lines[line] for trace in traces]
    measured: float | None = statistics.fmean(time.seconds for time in times)
    busy = statistics.fmean(time.busy_seconds for time in times)
    if line == "optimizer" and not has_optimizer:
        measured = None
    if not busy and not expected and line != "idle":
        return None
    calls = [(trace, call) for trace in traces for call in trace.collectives if call.line == line]
    known = [(call.message_bytes, trace.steps) for trace, call in calls]
    moved = None
    if known and all(size is not None for size, _ in known):
        moved = sum((size or 0.0) / steps for size, steps in known) / len(traces)
    found = ComparedLine(
        line=line,
        predicted_seconds=expected,
        measured_seconds=measured,
        overlapped_seconds=statistics.fmean(trace.overlapped_seconds(line) for trace in traces),
        calls=sum(1 / trace.steps for trace, _ in calls) / len(traces)
        if calls
        else statistics.fmean(time.calls for time in times),
        message_bytes=moved,
        predicted_message_bytes=predicted.message_bytes.get(line)
        if line in COLLECTIVE_LINES
        else None,
        bus_gbytes_per_second=_bus_rate(traces, line),
        longest=max(times, key=lambda time: time.busy_seconds).longest,
        advice="",
    )
    step = statistics.fmean(trace.step_seconds for trace in traces)
    return replace(found, advice=_advice(found, step, is_cpu=traces[0].is_cpu))


def _bus_rate(traces: Sequence[RankTrace], line: Line) -> float | None:
    """Return the bus bandwidth of a kind of collective, GB/s over all its calls."""
    moved = seconds = 0.0
    for trace in traces:
        for call in trace.collectives:
            if call.line == line and call.bus_bytes is not None and call.seconds > 0:
                moved, seconds = moved + call.bus_bytes, seconds + call.seconds
    return moved / seconds / 1e9 if seconds else None


def _notes(predicted: PredictedStep, traces: Sequence[RankTrace], has_optimizer: bool) -> list[str]:
    notes = []
    unmarked = [trace for trace in traces if not trace.has_step_marks]
    if unmarked:
        steps, begun = unmarked[0].steps, max(trace.optimizer_marks for trace in unmarked)
        more = f", and an optimizer's step begins {begun} times in it" if begun > steps else ""
        notes.append(
            f"the trace has no ProfilerStep marks: all of it counts as {steps} "
            f"step{'' if steps == 1 else 's'}{more} (--steps N says otherwise)"
        )
    if not has_optimizer:
        notes.append("the trace has no optimizer step: the prediction is compared without it")
    if predicted.lines["matrix_products"] is None:
        notes.append("assume.mfu prices all kernels as one: their lines have no prediction")
    if len(traces) == 1 and traces[0].collectives:
        notes.append(
            "one rank's trace does not tell a slow link from a late rank: give every rank's"
        )
    if any(call.message_bytes is None for trace in traces for call in trace.collectives):
        notes.append(
            "some collectives have no sizes, so their links' rates are unknown: profile with "
            "record_shapes=True"
        )
    loading = statistics.fmean(trace.data_loading_seconds for trace in traces)
    if loading > 0.03 * statistics.fmean(trace.step_seconds for trace in traces):
        notes.append(
            f"the loop waits {loading * 1e3:,.1f} ms a step for its DataLoader: give it more "
            "workers"
        )
    notes += _product_notes(traces)
    unread = sum(trace.unread_events for trace in traces)
    if unread:
        notes.append(f"{unread} events have no usable time and are left out")
    return notes


def _product_notes(traces: Sequence[RankTrace]) -> list[str]:
    """Name products whose kernels tell of a mistake, whatever the plan expects of them."""
    names = [name for trace in traces for name, _ in trace.lines["matrix_products"].longest]
    unaligned = next((name for name in names if _UNALIGNED.search(name)), None)
    float32 = next((name for name in names if _FLOAT32.search(name)), None)
    notes = []
    if unaligned is not None:
        notes.append(
            f"a product runs with unaligned loads ({unaligned[:60]}): pad that width, often the "
            "vocabulary, to a multiple of 64"
        )
    if float32 is not None:
        notes.append(
            f"a product runs in float32 without tensor cores ({float32[:60]}): train in bf16, or "
            "allow TF32"
        )
    return notes


_UNALIGNED = re.compile(r"align[124]\b|_align[124]>")
_FLOAT32 = re.compile(r"sgemm|simt_sgemm|_f32f32_")


# What to do about a line: (line, whether it took longer than predicted).
_ADVICE: dict[tuple[Line, bool], str] = {
    ("matrix_products", True): "products run below the rate that the plan assumes: look for widths "
    "that are no multiple of 64, small micro-batches, and a GPU that lowers its clock",
    ("attention", True): "attention runs below the planned rate: check that a fused kernel runs "
    "(model.attention), and try flash_attention_2 or cuDNN",
    ("memory_bound", True): "more time goes into kernels that only move memory: fuse them with "
    "`model.kernels: compile`, or keep casts and copies out of the layers",
    ("other_kernels", True): "these kernels are of no known kind: their names say which library to "
    "look at",
    ("optimizer", True): "the update moves more than the plan's: use a fused optimizer, and "
    "clip gradients without a loop over the parameters",
    ("host_copies", True): "copies to and from the host are not hidden: pin the host's memory, and "
    "copy with non_blocking=True",
    ("all_reduce", True): "all-reduces show more than planned: compare the bus bandwidth with the "
    "link's, and raise the bucket size",
    ("all_gather", True): "all-gathers show more than planned: raise the prefetch or the bucket "
    "size, and compare the bus bandwidth with the link's",
    ("reduce_scatter", True): "reduce-scatters show more than planned: check that they overlap "
    "with the backward pass, and compare the bus bandwidth with the link's",
    ("all_to_all", True): "all-to-alls show more than planned: look at the balance of the experts, "
    "and keep their ranks inside a node or an NVLink domain",
    ("send_recv", True): "a stage waits for its neighbour: balance the layers over the stages, or "
    "use more micro-batches",
    ("other_collectives", True): "broadcasts and barriers take time: keep them out of the step",
    ("idle", True): "the device waits for the host: look for .item() and other synchronization, "
    "raise micro_batch_size, or use `model.kernels: compile`",
}
_CPU_ADVICE: dict[Line, str] = {
    "idle": "Python and dispatch take this time: larger micro-batches, and nothing but the step in "
    "the loop",
    "memory_bound": "operators that only move memory take longer than planned: `calibrate` "
    "measures this machine's bandwidth",
    "matrix_products": "products run below the planned rate: check the number of threads, and that "
    "nothing else runs on these cores",
}
_FASTER = "the plan prices it too high here: --calibrate FILE corrects it"
_NOT_THERE = "the plan expects it and the trace has none: check that both are of the same layout"
_NOT_PLANNED = "the plan has no such part: check that both are of the same layout"


def _advice(line: ComparedLine, step_seconds: float, *, is_cpu: bool) -> str:
    difference = line.difference_seconds
    least = max(NOTEWORTHY * (line.predicted_seconds or 0.0), NOTEWORTHY_OF_STEP * step_seconds)
    if difference is None or abs(difference) <= least:
        return ""
    if line.line in COLLECTIVE_LINES and line.line != "other_collectives":
        if not line.measured_seconds and not line.overlapped_seconds:
            return _NOT_THERE
        if not line.predicted_seconds and not line.predicted_message_bytes:
            return _NOT_PLANNED
    if difference < 0:
        return _FASTER
    if is_cpu and line.line in _CPU_ADVICE:
        return _CPU_ADVICE[line.line]
    return _ADVICE[line.line, True]


# Whether a trace can be of the plan's run at all.


def trace_mismatches(priced: PricedLayout, traces: Sequence[RankTrace]) -> tuple[Diagnostic, ...]:
    """Return a warning for each trace that seems to be of another run. Raises Refusal with SW3315
    where nothing can be compared."""
    gpu, world = priced.cluster.gpu, priced.strategy.world_size
    warnings: list[Diagnostic] = []
    for trace in traces:
        if trace.is_cpu != gpu.is_cpu:
            has = "no GPU kernel" if trace.is_cpu else f"kernels of {trace.device}"
            raise Refusal(
                _mismatch(
                    f"{trace.file!r} has {has}, and the plan is for {gpu.name}",
                    "Profile with ProfilerActivity.CUDA on the plan's GPUs, or name the recipe of "
                    "this run.",
                    is_error=True,
                )
            )
        if trace.world_size is not None and trace.world_size != world:
            warnings.append(
                _mismatch(
                    f"{trace.file!r} is of {trace.world_size} ranks, and the plan of {world}",
                    "Name the recipe or the compiled folder of this run.",
                )
            )
        words = trace.device.lower().replace("-", " ").split()
        if not gpu.is_cpu and gpu.name != "inline" and gpu.name.split("-")[0] not in words:
            warnings.append(
                _mismatch(
                    f"{trace.file!r} is of {trace.device}, and the plan is for {gpu.name}",
                    "Name the recipe or the compiled folder of this run.",
                )
            )
        warnings += _layer_mismatch(priced, trace)
    _check_ranks(traces)
    return tuple(dict.fromkeys(warnings))


def _check_ranks(traces: Sequence[RankTrace]) -> None:
    """Raise SW3315 where two files are of the same rank."""
    files: dict[int, str] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in files:
            raise Refusal(
                _mismatch(
                    f"{files[trace.rank]!r} and {trace.file!r} are both of rank {trace.rank}",
                    "Give one file a rank, all of the same run.",
                    is_error=True,
                )
            )
        files[trace.rank] = trace.file


def _mismatch(message: str, help: str, *, is_error: bool = False) -> Diagnostic:
    return found("SW3315", None, message, help, severity="error" if is_error else "warning")


def decoder_layers_of(priced: PricedLayout, pipeline_rank: int) -> int:
    return sum(priced.decoder_layers(block) for block in priced.ranks[pipeline_rank])


def _layer_mismatch(priced: PricedLayout, trace: RankTrace) -> list[Diagnostic]:
    """Return a warning where the number of attention calls fits no pass over the plan's layers."""
    rank = pipeline_rank_of(priced, trace.rank)
    if rank is None or not trace.attention or priced.graph.attention == "eager":
        return []
    calls = sum(not call.is_backward for call in trace.attention)
    passes = trace.steps * priced.strategy.gradient_accumulation_steps
    layers = decoder_layers_of(priced, rank)
    if priced.graph.vision is not None or calls in range(layers * passes, 2 * layers * passes + 1):
        return []
    return [
        _mismatch(
            f"{trace.file!r} has {calls / trace.steps:g} forward calls of attention a step, and "
            f"the plan {layers} layers x {priced.strategy.gradient_accumulation_steps} "
            "micro-batches",
            "Check that both are of the same model and batch, and that the trace holds whole "
            "steps.",
        )
    ]
