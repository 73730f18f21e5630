"""Chart several DiLoCo islands: the outer step's cost, each island's run, and the merged run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compile.compiled_folder import CompiledFolder
from shardwright.diloco.island_metrics import (
    MergedStep,
    effective_rounds,
    merged_steps,
    missing,
    read_rounds,
)
from shardwright.monitor.run_files import OUTER_STEPS_FILE, OuterLine
from shardwright.plan.island_plans import island_folders
from shardwright.report.bokeh_document import Figure, data_source
from shardwright.report.report_charts import CHOSEN, DASHED, ORANGE, group_colors, hover, plot
from shardwright.report.run_results import MOST_POINTS, MeasuredRun, read_run
from shardwright.utils.json_lines import rows_by_step

MOST_DRAWN = 16  # islands with a curve of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWait:
    """Record how long training waited for an outer step.

    members: islands that took part; () where another island's state was loaded
    """

    step: int
    members: tuple[int, ...]
    seconds: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> OuterWait:
        """Read a row of an island's run/outer.jsonl."""
        members = tuple(int(each) for each in row["members"])
        return cls(step=int(row["step"]), members=members, seconds=float(row["seconds"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandRun:
    """Hold one island's run.

    absent: consecutive outer steps, up to the last one, without this island
    """

    island: int
    run: MeasuredRun
    waits: tuple[OuterWait, ...]
    absent: int

    @property
    def median_wait_seconds(self) -> float:
        """Return the median wait; NaN where the island made no outer step."""
        return statistics.median(w.seconds for w in self.waits) if self.waits else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsRun:
    """Hold the runs of the islands whose folders are here.

    whole: at most MOST_POINTS of the merged steps, evenly spaced
    tokens: of all islands
    outer_steps: None where the store's record is elsewhere
    """

    islands: tuple[IslandRun, ...]
    whole: tuple[MergedStep, ...]
    tokens: int
    outer_steps: int | None


def read_islands_run(subject: CompiledFolder) -> IslandsRun | None:
    """Read the islands' runs; None for a plan without several islands, or where none finished a
    step."""
    plan, folder = subject.plan, subject.folder
    if not plan.island_numbers:
        return None
    here = {k: each for k, each in enumerate(island_folders(plan, folder)) if each.is_dir()}
    rounds = effective_rounds(read_rounds(folder))
    absent = missing(plan.diloco.islands, rounds)
    islands = tuple(
        IslandRun(
            island=k,
            run=run,
            waits=tuple(
                rows_by_step(each / OUTER_STEPS_FILE, OuterWait.from_row, OuterLine).values()
            ),
            absent=absent.get(k, 0),
        )
        for k, each in here.items()
        if (run := read_run(each, plan)) is not None
    )
    whole = merged_steps(here, rounds, plan.diloco.every_steps)
    if not islands or not whole:
        return None
    stride = max(1, math.ceil(len(whole) / MOST_POINTS))
    return IslandsRun(
        islands=islands,
        whole=tuple(each for i, each in enumerate(whole) if i % stride == 0 or i == len(whole) - 1),
        tokens=sum(each.tokens for each in whole),
        outer_steps=len(rounds) or None,
    )


def loss_chart(found: IslandsRun) -> Figure:
    """Chart the merged loss, and each island's."""
    made = plot(name="islands-loss", height=320, x_axis_label="step", y_axis_label="loss")
    for each, colour in _drawn(found):
        steps = each.run.drawn
        source = data_source({"step": [s.step for s in steps], "loss": [s.loss for s in steps]})
        made.line(
            "step",
            "loss",
            source=source,
            line_width=1,
            line_color=colour,
            line_alpha=0.7,
            name=_name(each),
        )
    source = data_source(
        {
            "step": [each.step for each in found.whole],
            "loss": [each.loss for each in found.whole],
            "islands": [", ".join(map(str, each.islands)) for each in found.whole],
        }
    )
    whole = made.line(
        "step", "loss", source=source, line_width=2.5, line_color=CHOSEN, name="all islands"
    )
    rows = [("step", "@step"), ("loss", "@loss{0.0000}"), ("islands", "@islands")]
    made.add_tools(hover(rows, renderers=[whole], mode="vline"))
    return made


def waits_chart(found: IslandsRun, predicted_seconds: float) -> Figure:
    """Chart each island's wait for each outer step, against the prediction."""
    made = plot(
        name="islands-waits",
        height=260,
        x_axis_label="step",
        y_axis_label="seconds of an outer step",
    )
    steps = [wait.step for each in found.islands for wait in each.waits]
    for each, colour in _drawn(found):
        source = data_source(
            {
                "step": [wait.step for wait in each.waits],
                "seconds": [wait.seconds for wait in each.waits],
                "members": [
                    ", ".join(map(str, wait.members)) or "a state taken" for wait in each.waits
                ],
            }
        )
        drawn = made.scatter(
            "step", "seconds", source=source, size=6, color=colour, name=_name(each)
        )
        rows = [("", f"<b>{_name(each)}</b>"), ("step", "@step"), ("waited", "@seconds{0.000} s")]
        made.add_tools(hover([*rows, ("with", "@members")], renderers=[drawn]))
    if steps:
        ends, line = (
            [min(steps), max(steps)],
            {"line_width": 2, "line_dash": DASHED, "line_color": ORANGE},
        )
        made.line(ends, [predicted_seconds] * 2, name="predicted", **line)
    made.y_range.start = 0
    return made


def _drawn(found: IslandsRun) -> Sequence[tuple[IslandRun, str]]:
    drawn = found.islands[:MOST_DRAWN]
    return list(zip(drawn, group_colors(len(drawn)), strict=True))


def _name(each: IslandRun) -> str:
    return f"island {each.island}"
