"""The table of `shardwright plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cli.tables import table_lines
from shardwright.cost.measured import measured_error
from shardwright.ir.estimate import Estimate

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """note: what sets the row apart, such as a schedule, a broken rule, or that it is outside the pins."""

    estimate: Estimate
    note: str
    broken: bool


HEADER = (
    *("#", "TP x PP x DP", "ZeRO", "micro x accum", "checkpointing", "peak / capacity GiB (headroom)"),
    *("s/step", "tokens/s/GPU", "MFU", "days", "cost", "Δ", ""),
)
TEXT_COLUMNS = ("checkpointing", "")  # the others are numbers, and stand on the right


def table(rows: Sequence[Row]) -> list[str]:
    """Lines without a line end. Δ: step time against row 1."""
    cells = [_cells(place, row, rows[0].estimate) for place, row in enumerate(rows, start=1)]
    text = [i for i, name in enumerate(HEADER) if name in TEXT_COLUMNS]
    return table_lines(HEADER, cells, text=text, bold=() if rows[0].broken else (0,))


def _cells(place: int, row: Row, first: Estimate) -> tuple[str, ...]:
    e, s = row.estimate, row.estimate.strategy
    peak, capacity, step = e.memory.peak_bytes, e.memory.capacity_bytes, e.time.step_seconds
    training = e.training
    days = f"{training.days:.3g}" if training.steps else "-"
    cost = f"{training.cost:,.0f}" if training.cost is not None else f"{training.gpu_hours:,.0f} GPU-h"
    return (
        str(place),
        f"{s.tensor} x {s.pipeline} x {s.data}",
        str(s.zero_stage),
        f"{s.micro_batch_size} x {s.gradient_accumulation_steps}",
        s.activation_checkpointing,
        f"{peak / GIB:.1f} / {capacity / GIB:.1f} ({1 - peak / capacity:.0%})",
        f"{step:.3g} ± {step * measured_error().step_time:.2g}",
        f"{e.time.tokens_per_second_per_gpu:,.0f}",
        f"{e.time.mfu:.1%}",
        days,
        cost if training.steps else "-",
        f"{step / first.time.step_seconds - 1:+.1%}" if place > 1 else "",
        row.note,
    )


def error_note() -> str:
    """Where the ± comes from."""
    e = measured_error()
    return (
        f"± {e.step_time:.1%} of the step, {e.memory:.1%} of the memory: the mean error on {e.runs} published runs, "
        f"each of {e.projects} projects predicted from the others (make bench-cost)"
    )
