"""The table of `shardwright plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.cli.terminal_tables import table_lines
from shardwright.cost.prediction_errors import flops_source_text, not_calibrated_text, source
from shardwright.layout.axes import AXES, Axis
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.utils.number_format import format_number, rank_or_gpu

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """note: what sets the row apart, such as a schedule, a broken rule, or that it is outside the
    pins."""

    estimate: Estimate
    note: str
    broken: bool


DEGREES = "degrees"  # the table names the axes
HEADER = (
    *("#", DEGREES, "ZeRO", "micro x accum", "checkpointing", "peak / capacity GiB (headroom)"),
    *("s/step", "tokens/s/GPU", "MFU", "days", "cost", "Δ", ""),
)
TEXT_COLUMNS = ("checkpointing", "")  # the others are numbers, and stand on the right


def table(rows: Sequence[PlanRow], *, is_cpu: bool) -> list[str]:
    """Lines without a line end. Δ: step time against row 1."""
    axes = [
        axis for axis in AXES if axis.short and (axis.is_auto_by_default or _is_had(axis, rows))
    ]
    cells = [
        _cells(place, row, rows[0].estimate, axes, is_cpu=is_cpu)
        for place, row in enumerate(rows, start=1)
    ]
    text = [i for i, name in enumerate(HEADER) if name in TEXT_COLUMNS]
    header = [name.replace("/GPU", f"/{rank_or_gpu(is_cpu=is_cpu)}") for name in HEADER]
    header[HEADER.index(DEGREES)] = " x ".join(axis.short for axis in axes)
    return table_lines(header, cells, text=text, bold=() if rows[0].broken else (0,))


def _is_had(axis: Axis, rows: Sequence[PlanRow]) -> bool:
    return any(row.estimate.strategy.values()[axis] != axis.plain for row in rows)


def _cells(
    place: int, row: PlanRow, first: Estimate, axes: Sequence[Axis], *, is_cpu: bool
) -> tuple[str, ...]:
    e, s = row.estimate, row.estimate.strategy
    peak, capacity, step = e.memory.peak_bytes, e.memory.capacity_bytes, e.time.step_seconds
    training = e.training
    days = format_number(training.days) if training.steps else "-"
    hours = f"{format_number(training.gpu_hours)} {rank_or_gpu(is_cpu=is_cpu)}-h"
    cost = f"{training.cost:,.0f}" if training.cost is not None else hours
    return (
        str(place),
        " x ".join(str(s.values()[axis]) for axis in axes),
        str(s.zero_stage),
        f"{s.micro_batch_size} x {s.gradient_accumulation_steps}",
        str(s.activation_checkpointing),
        f"{peak / GIB:.1f} / {capacity / GIB:.1f} {free_memory_text(e.memory)}",
        f"{step:.3g}" + ("" if e.error.step_time is None else f" ± {step * e.error.step_time:.2g}"),
        f"{e.time.tokens_per_second_per_gpu:,.0f}",
        f"{e.time.mfu:.1%}",
        days,
        cost if training.steps else "-",
        f"{step / first.time.step_seconds - 1:+.1%}" if place > 1 else "",
        row.note,
    )


def free_memory_text(memory: Memory) -> str:
    """The share of a device that is left, or how often the peak would fill it."""
    times = memory.peak_bytes / memory.capacity_bytes
    return (
        f"({1 - times:.0%})"
        if memory.fits
        else f"does not fit ({times:.{1 if times >= 1.05 else 2}f}x)"
    )


def error_notes(estimates: Sequence[Estimate]) -> list[str]:
    """Where the ± comes from, why rows of the table have none, and what else makes them less
    sure."""
    notes = []
    known = [
        (e.error.step_time, e.error.step_time_regime)
        for e in estimates
        if e.error.step_time is not None
    ]
    if known:
        regimes = "; ".join(f"{share:.1%} ({regime})" for share, regime in dict.fromkeys(known))
        notes.append(f"± {regimes}: {source()}")
    for reason, rows in _rows_by(e.error.step_time_reason for e in estimates).items():
        which = (
            ""
            if len(rows) == len(estimates)
            else f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}: "
        )
        notes.append(which + not_calibrated_text(reason))
    flops = flops_source_text(estimates[0].flops_source) if estimates else ""
    return [*notes, *([f"FLOPs are {flops}"] if flops else [])]


def _rows_by(reasons: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, reason in enumerate(reasons, start=1):
        if reason:
            found.setdefault(reason, []).append(place)
    return found
