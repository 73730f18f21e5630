"""Name the sequences of a step's global batch: where two attempts fail at one step, its data is the
first suspect."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardwright.data.data_sources import data_sections
from shardwright.data.dataset import resolve
from shardwright.data.sequences import SubsetSequences
from shardwright.diagnostics import Refusal
from shardwright.layout.formats import FORMATS
from shardwright.monitor.attempt_records import METRICS_FILE
from shardwright.monitor.run_files import MetricsLine
from shardwright.plan.plan import Plan
from shardwright.utils.json_lines import read_json_lines

MAX_RANGES = 8
"""Ranges of row numbers that are named of one part."""


def first_nonfinite_step(plan: Plan, folder: Path) -> int | None:
    """Return the first of the newest steps in a row whose loss or gradient norm is not finite; None
    where the last loss is finite.

    A gradient that is not finite spoils the weights, so the loss is the next step's to tell. A loss
    scaler leaves such a step out, so under fp16 the losses alone count.
    """
    first = None
    scaled = FORMATS[plan.training.precision].scales_loss
    for line in read_json_lines(folder / METRICS_FILE, MetricsLine, newest_first=True):
        is_bad = line.get("loss", 0.0) is None
        if first is not None and not scaled:
            is_bad = is_bad or line.get("grad_norm", 0.0) is None
        if not is_bad:
            break
        first = int(line["step"])
    return first


def batch_text(plan: Plan, folder: Path, step: int) -> str:
    """Return the rows that a step trains, by the part of the data; "" where the data cannot be
    opened. Rows are counted from 0, of the array or of the sequences that `prepare` made."""
    try:
        _, data = resolve(plan, folder)
        indices = np.asarray(data.order.indices(step))
    except (Refusal, OSError, ValueError, ZeroDivisionError):
        return ""
    firsts = np.cumsum([0, *data.parts])
    parts = getattr(data.train, "parts", (data.train,))
    texts = []
    for number, section in enumerate(data_sections(plan.data)):
        own = indices[(indices >= firsts[number]) & (indices < firsts[number + 1])]
        rows = own - firsts[number]
        if isinstance(source := parts[number], SubsetSequences):
            rows = source.chosen[rows]
        if len(rows):
            texts.append(
                f"rows {_ranges(sorted(map(int, rows)))} of {section.path or section.kind}"
            )
    return f"step {step} trains {'; '.join(texts)}" if texts else ""


def _ranges(rows: list[int]) -> str:
    """Return sorted numbers as 3, 7-9."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:MAX_RANGES]]
    return ", ".join(shown) + (f" and {len(ranges) - MAX_RANGES} more" * (len(ranges) > MAX_RANGES))
