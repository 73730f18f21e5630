"""`shardwright explain DIR|RECIPE --trace FILE...`: a profiled step against the plan, line by line,
and the file that corrects the plan (`--calibrate`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.estimate_command import diagnostics_json, measurement_lines
from shardwright.cli.terminal import (
    labelled_lines,
    print_diagnostics,
    shell_quoted,
    table_lines,
    title,
)
from shardwright.cost.layout_costs import RankMemoryBreakdown, break_down
from shardwright.diagnostics import Diagnostic, refusal
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.trace.kernel_classes import COLLECTIVE_LINES, LINE_LABELS
from shardwright.trace.memory_snapshot import (
    MEMORY_KINDS,
    MemoryKind,
    MemoryPeak,
    is_memory_snapshot,
    read_memory_peak,
)
from shardwright.trace.plan_comparison import (
    ComparedLine,
    StepComparison,
    compare_step,
    pipeline_rank_of,
    predicted_step,
    trace_mismatches,
)
from shardwright.trace.rank_comparison import Cause, find_causes
from shardwright.trace.step_trace import RankTrace, read_step_trace
from shardwright.trace.trace_calibration import TraceCalibration, calibrate_from_trace
from shardwright.utils.file_io import write_atomically
from shardwright.utils.json_values import JsonDocument, copy_shared_fields, strict_json
from shardwright.utils.number_format import GIB, format_bytes, format_number

if TYPE_CHECKING:
    from shardwright.cli.command_options import PricedRecipe

MOST_ADVICE = 4
CAUSE_LABELS = {"late_rank": "late rank", "slow_link": "slow link", "slow_layer": "slow layer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMemory:
    """Compare one kind of memory at the peak; None where the plan or the snapshot has no such
    kind."""

    kind: MemoryKind
    label: str
    predicted_bytes: int | None
    measured_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceExplanation:
    """Hold all that the files tell; step is None where only memory snapshots were given."""

    traces: tuple[RankTrace, ...]
    step: StepComparison | None
    causes: tuple[Cause, ...]
    peak: MemoryPeak | None
    memory: tuple[ComparedMemory, ...]
    diagnostics: tuple[Diagnostic, ...]
    calibration: TraceCalibration | None


def run_explain_trace(
    name: str,
    overrides: Sequence[str],
    files: Sequence[Path],
    *,
    steps: int | None,
    calibrate: Path | None,
    as_json: bool,
) -> int:
    """Raises Refusal: SW3311 to SW3317, and all that a recipe can be refused for."""
    from shardwright.cli.command_options import read_priced_recipe

    # The files first: a plan may take its time.
    snapshots = [path for path in files if is_memory_snapshot(path)]
    traces = [read_step_trace(path, steps) for path in files if path not in snapshots]
    peaks = [read_memory_peak(path) for path in snapshots]
    priced = read_priced_recipe(name, overrides)
    found = explain_trace(priced, traces, peaks, calibrate=calibrate is not None)
    if calibrate is not None and found.calibration is not None:
        write_atomically(calibrate, strict_json(found.calibration.measurements) + "\n")
    if as_json:
        print(strict_json(trace_json(priced, found, calibrate)), flush=True)
    else:
        print(trace_page(priced, found, calibrate), flush=True)
        print_diagnostics(found.diagnostics, None)
    return 0


def explain_trace(
    priced: PricedRecipe,
    traces: Sequence[RankTrace],
    peaks: Sequence[MemoryPeak],
    *,
    calibrate: bool,
) -> TraceExplanation:
    problem, estimate = copy_shared_fields(Problem, priced), priced.estimate
    layout, _ = price_planned_layout(problem, estimate.strategy, estimate.boundaries)
    peak = max(peaks, key=lambda each: each.allocated_bytes, default=None)
    warnings: tuple[Diagnostic, ...] = ()
    step: StepComparison | None = None
    causes: tuple[Cause, ...] = ()
    calibration: TraceCalibration | None = None
    if traces:
        warnings = trace_mismatches(layout, traces)
        predicted = predicted_step(layout, estimate, traces)
        step = compare_step(predicted, traces)
        causes = find_causes(layout, traces)
        if calibrate:
            calibration = calibrate_from_trace(problem, layout, predicted, traces, peak)
    elif calibrate:
        raise refusal(
            "SW3317",
            "a memory snapshot alone corrects no figure of the plan",
            "Give a trace of torch.profiler, too: it has the seconds that --calibrate corrects.",
        )
    breakdown = break_down(layout, estimate)
    rank = breakdown.peak_memory_rank
    if len(traces) == 1 and (own := pipeline_rank_of(layout, traces[0].rank)) is not None:
        rank = own
    return TraceExplanation(
        traces=tuple(traces),
        step=step,
        causes=causes,
        peak=peak,
        memory=_compared_memory(breakdown.ranks[rank].memory, peak, traces),
        diagnostics=warnings,
        calibration=calibration,
    )


# Memory


MEMORY_LABELS: dict[MemoryKind, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "working": "working (backward, temporary)",
    "unknown": "not told by a stack",
    "allocator": "kept by the allocator",
}


def _compared_memory(
    predicted: RankMemoryBreakdown, peak: MemoryPeak | None, traces: Sequence[RankTrace]
) -> tuple[ComparedMemory, ...]:
    """Return the kinds of a snapshot, what differs most first."""
    if peak is None:
        return ()
    rows = [
        ComparedMemory(
            kind=kind,
            label=MEMORY_LABELS[kind],
            predicted_bytes=None if kind == "unknown" else getattr(predicted, f"{kind}_bytes"),
            measured_bytes=peak.kinds[kind],
        )
        for kind in MEMORY_KINDS
        if kind != "unknown" or peak.kinds[kind]
    ]
    return tuple(
        sorted(rows, key=lambda row: -abs((row.measured_bytes or 0) - (row.predicted_bytes or 0)))
    )


# The page


def trace_page(priced: PricedRecipe, found: TraceExplanation, calibrate: Path | None) -> str:
    sections = [_head(priced, found)]
    if found.step is not None:
        sections += [_findings(found, found.step), _lines(found.step), _notes(found.step)]
    sections += [_memory(found), _calibration(found.calibration, calibrate)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(priced: PricedRecipe, found: TraceExplanation) -> list[str]:
    rows = [("recipe", priced.recipe.name), ("layout", priced.estimate.strategy.describe())]
    if found.traces:
        first = found.traces[0]
        device = "a CPU" if first.is_cpu else first.device
        ranks = [trace.rank for trace in found.traces if trace.rank is not None]
        of = f", rank{'' if len(ranks) == 1 else 's'} {_listed(ranks)}" if ranks else ""
        several = "" if len(found.traces) == 1 else f"{len(found.traces)} files, "
        steps = f"{first.steps} step{'' if first.steps == 1 else 's'}"
        rows.append(("trace", f"{several}{steps} on {device}{of}"))
    if found.step is not None:
        predicted, measured = found.step.predicted_seconds, found.step.measured_seconds
        rows.append(
            (
                "step",
                f"predicted {predicted:.4g} s, measured {measured:.4g} s: "
                f"{_ratio_text(measured, predicted)}",
            )
        )
    return labelled_lines(rows, 10)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _ratio_text(measured: float | None, predicted: float | None) -> str:
    return "-" if not predicted or measured is None else f"{measured / predicted:.2f} x"


def _findings(found: TraceExplanation, step: StepComparison) -> list[str]:
    """Say what costs most: causes that the ranks and layers show, then the lines that differ."""
    texts = [
        f"{CAUSE_LABELS[cause.kind]}: {cause.message}; {cause.advice}" for cause in found.causes
    ]
    texts += [
        f"{LINE_LABELS[line.line]}: {(line.difference_seconds or 0.0) * 1e3:+,.1f} ms"
        f"{_longest(line)}; {line.advice}"
        for line in step.lines
        if line.advice
    ][:MOST_ADVICE]
    if not texts:
        return ["no line differs by more than 10 % of its prediction"]
    return [
        title("What differs most"),
        *(f"  {place}. {text}" for place, text in enumerate(texts, start=1)),
    ]


def _longest(line: ComparedLine) -> str:
    if not line.longest:
        return ""
    name, seconds = line.longest[0]
    short = name if len(name) <= 60 else name[:57] + "..."
    return f" (longest: {short}, {seconds * 1e3:,.1f} ms)"


def _lines(step: StepComparison) -> list[str]:
    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:,.2f}"

    rows = []
    for line in step.lines:
        difference = line.difference_seconds
        is_collective = line.line in COLLECTIVE_LINES
        rows.append(
            (
                LINE_LABELS[line.line],
                milliseconds(line.predicted_seconds),
                milliseconds(line.measured_seconds),
                _ratio_text(line.measured_seconds, line.predicted_seconds),
                "-" if difference is None else f"{difference * 1e3:+,.2f}",
                milliseconds(line.overlapped_seconds) if is_collective else "",
                format_number(line.calls) if line.line != "idle" else "",
                "" if line.message_bytes is None else format_bytes(round(line.message_bytes)),
                "" if line.bus_gbytes_per_second is None else f"{line.bus_gbytes_per_second:.3g}",
            )
        )
    rows.append(
        (
            "the step",
            milliseconds(step.predicted_seconds),
            milliseconds(step.measured_seconds),
            _ratio_text(step.measured_seconds, step.predicted_seconds),
            f"{(step.measured_seconds - step.predicted_seconds) * 1e3:+,.2f}",
            *("",) * 4,
        )
    )
    header = (
        "line",
        "predicted ms",
        "measured ms",
        "ratio",
        "difference ms",
        "overlapped ms",
        "calls",
        "bytes",
        "GB/s",
    )
    return [
        title("A step, line by line"),
        *table_lines(header, rows, text=(0,), indent="  "),
        "  collectives: seconds that nothing hides; overlapped: beside computing; bytes: of the "
        "buffers; GB/s: bus bandwidth, as nccl-tests counts it",
    ]


def _notes(step: StepComparison) -> list[str]:
    return [f"note: {note}" for note in step.notes]


def _memory(found: TraceExplanation) -> list[str]:
    def gib(value: int | None) -> str:
        return "-" if value is None else f"{value / GIB:.2f}"

    if found.peak is None:
        measured = [trace.peak_bytes for trace in found.traces if trace.peak_bytes]
        if not measured:
            return []
        return [f"peak of what the allocator handed out: {max(measured) / GIB:.2f} GiB"]
    rows = [
        (
            row.label,
            gib(row.predicted_bytes),
            gib(row.measured_bytes),
            _ratio_text(row.measured_bytes, row.predicted_bytes),
            "-"
            if row.predicted_bytes is None or row.measured_bytes is None
            else f"{(row.measured_bytes - row.predicted_bytes) / GIB:+.2f}",
        )
        for row in found.memory
    ]
    when = "at the peak" if found.peak.has_history else "at the dump: it recorded no history"
    advice = memory_advice(found)
    return [
        title(f"Memory of GPU {found.peak.device}, {when}: GiB"),
        *table_lines(
            ("kind", "predicted", "measured", "ratio", "difference"), rows, text=(0,), indent="  "
        ),
        *([f"  {advice}"] if advice else []),
    ]


_MEMORY_ADVICE: dict[MemoryKind, str] = {
    "parameters": "weights are there twice or in another precision: load them in the training "
    "precision, and drop the loaded state dict",
    "gradients": "gradients are kept longer or in another precision than planned: call "
    "zero_grad(set_to_none=True)",
    "optimizer": "the optimizer holds more states than planned: check its type and ZeRO stage",
    "activations": "layers save more than planned: check activation_checkpointing, and that no "
    "output or loss with a graph is kept",
    "working": "the backward pass or the update holds larger temporary tensors than planned: a "
    "chunked loss (`model.loss: chunked`) and foreach=False make them smaller",
    "unknown": "most of it was allocated before the recording began: begin it before the model is "
    "built",
    "allocator": "freed blocks stay unused: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps "
    "fewer of them",
}


def memory_advice(found: TraceExplanation) -> str:
    """Return a sentence on the kind that exceeds its prediction most; "" where none does by a
    tenth."""
    over = [
        row for row in found.memory if (row.measured_bytes or 0) > 1.1 * (row.predicted_bytes or 0)
    ]
    if not over:
        return ""
    worst = max(over, key=lambda row: (row.measured_bytes or 0) - (row.predicted_bytes or 0))
    return f"{worst.label}: {_MEMORY_ADVICE[worst.kind]}"


def _calibration(calibration: TraceCalibration | None, path: Path | None) -> list[str]:
    if calibration is None or path is None:
        return []
    measured = f"cluster.measured: {shell_quoted(str(path))} in the recipe"
    rows = [
        (
            "step",
            f"predicted {calibration.step_before:.4g} s before, "
            f"{calibration.step_after:.4g} s with the file",
        ),
        ("written", str(path)),
        ("next", f"{measured}, then `shardwright plan`"),
    ]
    return [
        *measurement_lines(calibration.measurements),
        *(f"not corrected: {text}" for text in calibration.skipped),
        *labelled_lines(rows, 13),
    ]


# --json


def trace_json(
    priced: PricedRecipe, found: TraceExplanation, calibrate: Path | None
) -> JsonDocument:
    step, calibration = found.step, found.calibration
    return {
        "recipe": priced.name,
        "strategy": priced.estimate.strategy,
        "diagnostics": diagnostics_json(found.diagnostics),
        "step": None
        if step is None
        else {
            "predicted_seconds": step.predicted_seconds,
            "measured_seconds": step.measured_seconds,
            "ratio": step.measured_seconds / step.predicted_seconds
            if step.predicted_seconds
            else None,
            "notes": step.notes,
        },
        "causes": found.causes,
        "lines": [] if step is None else [_line_json(line) for line in step.lines],
        "traces": [_rank_json(trace) for trace in found.traces],
        "memory": None
        if found.peak is None
        else {
            "file": found.peak.file,
            "device": found.peak.device,
            "allocated_bytes": found.peak.allocated_bytes,
            "reserved_bytes": found.peak.reserved_bytes,
            "has_history": found.peak.has_history,
            "kinds": [
                {key: value for key, value in dataclasses.asdict(row).items() if key != "label"}
                for row in found.memory
            ],
            "advice": memory_advice(found),
        },
        "calibration": None
        if calibration is None
        else {
            "file": str(calibrate),
            "constants": calibration.constants,
            "step_seconds_before": calibration.step_before,
            "step_seconds_after": calibration.step_after,
            "not_corrected": calibration.skipped,
        },
    }


def _line_json(line: ComparedLine) -> JsonDocument:
    return {
        **{f.name: getattr(line, f.name) for f in dataclasses.fields(line)},
        "ratio": line.ratio,
        "difference_seconds": line.difference_seconds,
        "longest": [{"name": name, "seconds": seconds} for name, seconds in line.longest],
    }


def _rank_json(trace: RankTrace) -> JsonDocument:
    return {
        "file": trace.file,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "device": "cpu" if trace.is_cpu else trace.device,
        "steps": trace.steps,
        "step_seconds": trace.step_seconds,
        "lines": {
            line: {"seconds": time.seconds, "busy_seconds": time.busy_seconds}
            for line, time in trace.lines.items()
        },
        "peak_bytes": trace.peak_bytes,
        "unread_events": trace.unread_events,
    }
