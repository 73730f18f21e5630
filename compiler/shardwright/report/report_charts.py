"""Build the page's Bokeh figures from plain numbers; page.js applies the page's colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.layout.axes import rank_order_axes
from shardwright.layout.layout_estimate import Memory
from shardwright.plan.plan import Plan
from shardwright.report.bokeh_document import (
    Figure,
    Model,
    box_zoom_tool,
    data_source,
    field_of,
    fixed_ticker,
)
from shardwright.report.layout_space import VERDICTS as VERDICT_NAMES
from shardwright.report.layout_space import LayoutPoint, LayoutSpace
from shardwright.report.run_results import MeasuredRun
from shardwright.report.step_timeline import KINDS, PASS_KINDS, StepTimeline, sampled_ranks

# Colours for colour-blind readers: Okabe and Ito's eight for kinds, cividis for many of one kind
# (jfly.uni-koeln.de/color: blue, orange, green, vermillion, sky, purple, yellow, grey).
CATEGORIES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#8A8F98",
)
BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, _, GREY = CATEGORIES

MEMORY_COLORS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "workspace": PURPLE,
}
STEP_COLORS = {
    "compute": BLUE,
    "collectives inside layers": SKY,
    "messages between stages": ORANGE,
    "data-parallel collectives": PURPLE,
    "optimizer": GREEN,
    "outer step": VERMILLION,
    "idle": GREY,
}
BAR_COLORS = (SKY, BLUE, ORANGE, PURPLE, GREEN, VERMILLION)
"""Colours the kinds of step_timeline.KINDS."""
_HEX = (
    "2c416b2e426b2f436b31446b32446b33456b35466b36466b37476b38486b3a496b3b496b3c4a6b"
    "3d4b6b3e4b6b404c6b414d6b424e6b434e6b444f6b45506b46506b47516b48526b49536b4a536b"
    "4b546b4c556b4d556b4e566b4f576c50586c51586c52596c535a6c545a6c555b6c565c6c575d6d"
    "585d6d595e6d5a5f6d5b5f6d5c606d5d616e5e626e5f626e5f636e60646e61656f62656f63666f"
    "64676f65676f666870676970686a70686a70696b716a6c716b6d716c6d726d6e726e6f726f6f72"
    "6f70737071737172737272747373747474757575757575757676767777767878767978777a7977"
    "7b7a777b7b787c7b787d7c787e7d787f7e78807e78817f78828078838178848178858278868378"
    "8784788885788985788a86788b87788c88788d88788e89788f8a78908b78918c78928c78938d78"
    "948e78958f78968f779790779891779992779a93779b93779c94779d95779e96769f9776a09876"
    "a19876a29976a39a75a49b75a59c75a69c75a79d75a89e74a99f74aaa074aba174aca173ada273"
    "aea373afa473b0a572b1a672b2a672b4a771b5a871b6a971b7aa70b8ab70b9ab70baac6fbbad6f"
    "bcae6ebdaf6ebeb06ebfb16dc0b16dc1b26cc2b36cc3b46cc5b56bc6b66bc7b76ac8b86ac9b869"
    "cab969cbba68ccbb68cdbc67cebd67d0be66d1bf66d2c065d3c065d4c164d5c263d6c363d7c462"
    "d8c561d9c661dbc760dcc860ddc95fdeca5edfcb5de0cb5de1cc5ce3cd5be4ce5be5cf5ae6d059"
    "e7d158e8d257e9d356ebd456ecd555edd654eed753efd852f0d951f1da50f3db4ff4dc4ef5dd4d"
    "f6de4cf7df4bf9e049fae048fbe147fce246fde345ffe443ffe542ffe642ffe743ffe844ffe945"
)
CIVIDIS = tuple(f"#{_HEX[i : i + 6]}" for i in range(0, len(_HEX), 6))
"""Holds the colour map's 256 colours without the darkest 48, to be visible on black."""
VERDICTS = {"runs": BLUE, "tight": SKY, "does not fit": ORANGE, "ruled out": GREY}
CHOSEN = VERMILLION


def group_colors(count: int) -> tuple[str, ...]:
    """Return a colour for each group: categories, or cividis where there are more groups.

    More groups than colours of CIVIDIS share colours.
    """
    if count <= len(CATEGORIES):
        return CATEGORIES[:count]
    shown = min(count, len(CIVIDIS))
    return tuple(CIVIDIS[round(i * (len(CIVIDIS) - 1) / (shown - 1))] for i in range(shown))


GIB = 2**30
ROW_PIXELS, FRAME_PIXELS = 30, 84
MOST_BARS = 120_000
"""Limits the bars: more take a browser too long."""
FONT, DASHED = "12px", [6]
EDGES = {edge: edge for edge in ("left", "right", "bottom", "top")}  # columns of the same names
MARKS = {"star": "★", "x": "\N{MULTIPLICATION SIGN}"}


def plot(dimensions: str = "both", **options: Any) -> Figure:
    """Create a figure of the page's width; dragging a box zooms, as does the wheel with Ctrl."""
    tools = [
        box_zoom_tool(dimensions),
        Model("PanTool", dimensions=dimensions),
        Model("WheelZoomTool", dimensions=dimensions, renderers="auto", modifiers={"ctrl": True}),
        Model("ResetTool"),
    ]
    made = Figure(sizing_mode="stretch_width", tools=tools, toolbar_location="above", **options)
    made.toolbar.logo = None
    made.toolbar.active_drag = tools[0]
    made.toolbar.active_scroll = tools[2]
    made.background_fill_alpha = made.border_fill_alpha = 0
    made.outline_line_color = None
    made.axis.axis_label_text_font_style = "normal"
    made.axis.axis_label_text_font_size = made.axis.major_label_text_font_size = FONT
    made.axis.minor_tick_line_color = None
    made.min_border_right = 14
    return made


def hover(tooltips: Sequence[tuple[str, str]], **options: object) -> Model:
    """Create a tooltip with a table of names and values."""
    rows = "".join(
        f'<div><span class="tip">{name}</span> {value}</div>' for name, value in tooltips
    )
    style = "<style>.tip{color:#5b6573;display:inline-block;min-width:76px}</style>"
    page = (
        '<div style="max-width:320px;font:12px/1.45 '
        f'system-ui,sans-serif;color:#14181f">{style}{rows}</div>'
    )
    return Model("HoverTool", tooltips=page, sort_by=None, **{"renderers": "auto", **options})


def keys(made: Figure) -> list[tuple[str, str, str]]:
    """Return (name, colour, mark) of the figure's legend, which the page shows below it.

    A renderer without a name is left out.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for renderer in made.renderers:
        name = getattr(renderer, "name", "")
        if name and name not in found:
            glyph = renderer.glyph
            is_line = glyph._type == "Line"
            mark = getattr(glyph, "marker", {}).get("value", "")
            color = glyph.line_color if is_line else glyph.fill_color.get("value", "")
            found[name] = (name, color, "line" if is_line else MARKS.get(mark, ""))
    return list(found.values())


def memory_chart(memory: Memory) -> Figure:
    """Chart the peak-memory GPU of each pipeline rank against a GPU's capacity."""
    stages = [f"stage {stage.stage}" for stage in memory.stages]
    parts = {
        part: [getattr(stage, f"{part}_bytes") / GIB for stage in memory.stages]
        for part in MEMORY_COLORS
    }
    columns: dict[str, Sequence[object]] = {
        **parts,
        "stage": stages,
        "peak": [stage.peak_bytes / GIB for stage in memory.stages],
    }
    capacity = memory.capacity_bytes / GIB
    end = max(capacity, memory.peak_bytes / GIB) * 1.06
    made = _stacked("memory", "stage", columns, MEMORY_COLORS, end, "GiB")
    made.add_layout(_capacity_line(capacity))
    rows = [(part, f"@{{{part}}}{{0.00}} GiB") for part in parts]
    made.add_tools(hover([("", "<b>@stage</b>"), *rows, ("peak", "@peak{0.00} GiB")]))
    return made


def parts_chart(timeline: StepTimeline) -> Figure:
    """Chart the parts of each pipeline rank's step."""
    values = (
        [r.compute_seconds for r in timeline.ranks],
        [r.tensor_comm_seconds for r in timeline.ranks],
        [r.messages_seconds for r in timeline.ranks],
        [r.data_comm_seconds for r in timeline.ranks],
        [r.optimizer_seconds for r in timeline.ranks],
        [r.outer_comm_seconds for r in timeline.ranks],
        [r.idle_seconds for r in timeline.ranks],
    )
    shown = {
        name: seconds for name, seconds in zip(STEP_COLORS, values, strict=True) if max(seconds) > 0
    }
    columns: dict[str, Sequence[object]] = {
        "rank": [f"rank {rank}" for rank in range(len(timeline.ranks))],
        **shown,
    }
    colors = {name: STEP_COLORS[name] for name in shown}
    made = _stacked(
        "parts", "rank", columns, colors, timeline.simulated_seconds * 1.02, "seconds of the step"
    )
    made.add_tools(
        hover(
            [("", "<b>pipeline @rank</b>"), *((name, f"@{{{name}}}{{0.0000}} s") for name in shown)]
        )
    )
    return made


def _stacked(
    name: str,
    rows: str,
    columns: Mapping[str, Sequence[object]],
    colors: Mapping[str, str],
    end: float,
    unit: str,
) -> Figure:
    """Draw a stacked bar for each row, of the columns that have a colour.

    rows: the column with the rows' names, from the top
    """
    made = plot(
        "width",
        name=name,
        y_range=[*reversed(columns[rows])],
        x_range=(0, end),
        height=FRAME_PIXELS + ROW_PIXELS * len(columns[rows]),
        x_axis_label=unit,
    )
    source = data_source(columns)
    made.hbar_stack(
        list(colors), y=rows, height=0.72, colors=list(colors.values()), source=source, line_width=0
    )
    made.ygrid.grid_line_color = None
    return made


def _capacity_line(capacity: float) -> Model:
    """Draw a GPU's capacity (GiB)."""
    return Model(
        "Span",
        location=capacity,
        dimension="height",
        line_width=2,
        line_dash=DASHED,
        tags=["ink"],
        name="capacity",
    )


def timeline_chart(timeline: StepTimeline) -> Figure:
    """Chart every pipeline rank's step; the grey background is idle time."""
    ranks = sampled_ranks(timeline, MOST_BARS)
    row = {rank: place for place, rank in enumerate(ranks)}
    made = plot(
        "width",
        name="timeline",
        x_range=(0, timeline.simulated_seconds),
        y_range=(len(ranks) - 0.4, -0.6),
        height=FRAME_PIXELS + ROW_PIXELS * len(ranks),
        x_axis_label="seconds",
        lod_threshold=None,
    )
    made.quad(
        left=0,
        right=timeline.simulated_seconds,
        bottom=[place - 0.4 for place in range(len(ranks))],
        top=[place + 0.4 for place in range(len(ranks))],
        line_width=0,
        fill_color="#d9dde3",
        tags=["idle"],
        name="idle",
    )
    drawn_kinds = [
        (
            made.quad(source=source, fill_color=BAR_COLORS[kind], line_width=0, name=name, **EDGES),
            name,
        )
        for kind, name, source in _bars_by_kind(timeline, row)
    ]
    for drawn, name in drawn_kinds:
        about = [("", f"<b>{name}</b>"), ("rank", "@rank")]
        if name in PASS_KINDS:
            about += [("stage", "@stage"), ("micro-batch", "@micro")]
        made.add_tools(
            hover(
                [*about, ("from", "@left{0.0000} s"), ("to", "@right{0.0000} s")], renderers=[drawn]
            )
        )
    made.yaxis.ticker = fixed_ticker(range(len(ranks)))
    made.yaxis.major_label_overrides = {place: f"rank {rank}" for rank, place in row.items()}
    made.ygrid.grid_line_color = None
    made.xgrid.grid_line_color = None
    return made


def _bars_by_kind(
    timeline: StepTimeline, row: Mapping[int, int]
) -> Iterator[tuple[int, str, Model]]:
    """Yield (kind, its name, its bars) of each kind in the timeline.

    row: place from the top by pipeline rank
    """
    bars = [bar for bar in timeline.bars if bar.rank in row]
    kinds = np.array([bar.kind for bar in bars], dtype=np.uint8)
    # Messages are drawn lower than passes, so that they do not hide them.
    half = np.where(kinds == KINDS.index("messages"), 0.22, 0.4).astype(np.float32)
    centre = np.array([row[bar.rank] for bar in bars], dtype=np.float32)
    start = np.array([bar.start_seconds for bar in bars])
    stop = np.array([bar.stop_seconds for bar in bars])
    columns = {
        "left": start.astype(np.float32),
        "right": stop.astype(np.float32),
        "bottom": centre - half,
        "top": centre + half,
        "rank": np.array([bar.rank for bar in bars], dtype=np.int16),
        "micro": np.array([bar.micro_batch for bar in bars], dtype=np.int16),
        "stage": np.array([bar.stage for bar in bars], dtype=np.int16),
    }
    for kind, name in enumerate(KINDS):
        of_kind = kinds == kind
        if of_kind.any():
            yield (
                kind,
                name,
                data_source({key: values[of_kind] for key, values in columns.items()}),
            )


def space_chart(space: LayoutSpace, chosen_words: str, capacity_bytes: int) -> Figure:
    """Chart every layout by memory and step time, both logarithmic; the best are near the lower
    left."""
    made = plot(
        name="space",
        height=460,
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="peak memory, GiB",
        y_axis_label="step time, s",
    )
    for verdict in reversed(VERDICT_NAMES):
        points = [p for p in space.points if p.verdict == verdict]
        if points:
            reasons = [
                (f"{p.code}: {p.reason}" if p.code else p.verdict)
                + ("" if p.pinned else "; not as pinned")
                for p in points
            ]
            runs = verdict in ("runs", "tight")
            drawn = made.scatter(
                "gib",
                "seconds",
                source=_space_source(points, reasons),
                marker="circle" if runs else "x",
                size=9 if runs else 6,
                fill_color=VERDICTS[verdict],
                line_color="#ffffff" if runs else VERDICTS[verdict],
                line_width=0.5 if runs else 1,
                fill_alpha=0.9,
                line_alpha=1.0 if runs else 0.55,
                name=verdict,
            )
            made.add_tools(_space_hover(drawn))
    by_strategy = {p.strategy: p for p in space.points}
    front = [by_strategy[strategy] for strategy in space.front]
    made.line(
        [p.peak_bytes / GIB for p in front],
        [p.step_seconds for p in front],
        line_width=2,
        line_color=VERDICTS["runs"],
        name="Pareto front",
    )
    chosen = [p for p in space.points if p.strategy.describe() == chosen_words]
    star = made.scatter(
        "gib",
        "seconds",
        source=_space_source(chosen, ["chosen" for _ in chosen]),
        marker="star",
        size=20,
        fill_color=CHOSEN,
        line_color="#ffffff",
        name="chosen",
    )
    made.add_tools(_space_hover(star))
    capacity = capacity_bytes / GIB
    made.add_layout(_capacity_line(capacity))
    label = f"{capacity:g} GiB"
    made.add_layout(
        Model(
            "Label",
            x=capacity,
            y=6,
            y_units="screen",
            x_offset=6,
            text=label,
            text_font_size=FONT,
            tags=["ink"],
        )
    )
    made.xaxis.ticker = _doublings([p.peak_bytes / GIB for p in space.points])
    made.yaxis.ticker = _doublings([p.step_seconds for p in space.points])
    made.axis.formatter = Model(
        "CustomJSTickFormatter", code="return tick >= 1 ? tick.toLocaleString('en') : String(tick)"
    )
    return made


def _space_source(points: Sequence[LayoutPoint], reasons: list[str]) -> Model:
    return data_source(
        {
            "gib": [p.peak_bytes / GIB for p in points],
            "seconds": [p.step_seconds for p in points],
            "layout": [p.strategy.describe() for p in points],
            "reason": reasons,
        }
    )


def _doublings(values: Sequence[float]) -> Model:
    """Return ticks of a logarithmic axis: every power of two, or of four where there are many."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    stride = 1 if last - first <= 8 else 2
    return fixed_ticker([2.0**power for power in range(first - 4, last + 5) if power % stride == 0])


def _space_hover(drawn: object) -> Model:
    rows = (
        ("", "<b>@layout</b>"),
        ("memory", "@gib{0.0} GiB"),
        ("step", "@seconds{0.000} s"),
        ("", "@reason"),
    )
    return hover(rows, renderers=[drawn])


def loss_chart(run: MeasuredRun) -> Figure:
    steps = [s.step for s in run.drawn]
    made = plot(name="loss", height=300, x_axis_label="step", y_axis_label="loss")
    drawn = made.line(
        "step",
        "loss",
        source=data_source(
            {
                "step": steps,
                "loss": [s.loss for s in run.drawn],
                "norm": [s.grad_norm for s in run.drawn],
            }
        ),
        line_width=2,
        line_color=VERDICTS["runs"],
        name="training",
    )
    if run.evaluations:
        has_accuracy = any(math.isfinite(e.accuracy) for e in run.evaluations)
        measure = "accuracy" if has_accuracy else "perplexity"
        source = data_source(
            {
                "step": [e.step for e in run.evaluations],
                "loss": [e.loss for e in run.evaluations],
                measure: [getattr(e, measure) for e in run.evaluations],
            }
        )
        made.line("step", "loss", source=source, line_width=2, line_color=ORANGE, name="validation")
        points = made.scatter(
            "step", "loss", source=source, size=7, color=ORANGE, name="validation"
        )
        rows = (
            ("step", "@step"),
            ("validation", "@loss{0.0000}"),
            (measure, f"@{measure}{{0.00}}"),
        )
        made.add_tools(hover(rows, renderers=[points]))
    made.add_tools(
        hover(
            [("step", "@step"), ("loss", "@loss{0.0000}"), ("norm", "@norm{0.000}")],
            renderers=[drawn],
            mode="vline",
        )
    )
    return made


def seconds_chart(run: MeasuredRun, predicted_seconds: float) -> Figure:
    """Chart each step's seconds against the prediction."""
    made = plot(name="seconds", height=260, x_axis_label="step", y_axis_label="seconds")
    steps, seconds = [s.step for s in run.drawn], [s.step_seconds for s in run.drawn]
    drawn = made.scatter(
        "step",
        "seconds",
        source=data_source({"step": steps, "seconds": seconds}),
        size=4,
        color=VERDICTS["runs"],
        name="measured",
    )
    made.line(
        [steps[0], steps[-1]],
        [predicted_seconds] * 2,
        line_width=2,
        line_dash=DASHED,
        line_color=ORANGE,
        name="predicted",
    )
    made.y_range.start = 0
    made.y_range.end = 1.15 * max(
        predicted_seconds, sorted(seconds)[int(0.98 * (len(seconds) - 1))]
    )
    made.add_tools(hover([("step", "@step"), ("took", "@seconds{0.000} s")], renderers=[drawn]))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Describes a curve over the steps of a run.

    title: over the chart; field: of StepMetrics; form: of a value in the tooltip, as Bokeh writes
    it
    """

    title: str
    field: str
    unit: str
    form: str


STEP_CURVES = {
    "norm": StepCurve(
        title="Gradient norm, before clipping", field="grad_norm", unit="norm", form="0.0000"
    ),
    "rate": StepCurve(
        title="Learning rate", field="learning_rate", unit="learning rate", form="0.00e+0"
    ),
    "tokens": StepCurve(
        title="Tokens a second", field="tokens_per_second", unit="tokens/s", form="0,0"
    ),
    "margin": StepCurve(
        title="Chosen reward above the rejected one", field="margin", unit="margin", form="0.000"
    ),
    "accuracy": StepCurve(
        title="Share of pairs ranked right", field="accuracy", unit="accuracy", form="0.000"
    ),
    "kl": StepCurve(
        title="KL divergence from the teacher", field="kl", unit="KL divergence", form="0.000"
    ),
}
OF_AN_OBJECTIVE = ("margin", "accuracy", "kl")


def step_curves_of(run: MeasuredRun | None) -> dict[str, StepCurve]:
    """Return the curves that the run has: some objectives have their own."""
    last = None if run is None else run.drawn[-1]
    return {
        name: curve
        for name, curve in STEP_CURVES.items()
        if name not in OF_AN_OBJECTIVE
        or (last is not None and math.isfinite(getattr(last, curve.field)))
    }


def step_curve_chart(run: MeasuredRun, name: str) -> Figure:
    """Chart one of STEP_CURVES; an infinite or missing value leaves a gap."""
    curve = STEP_CURVES[name]
    values = [getattr(s, curve.field) for s in run.drawn]
    finite = [value for value in values if math.isfinite(value)]
    made = plot(name=name, height=220, x_axis_label="step", y_axis_label=curve.unit)
    shown = [value if math.isfinite(value) else math.nan for value in values]
    drawn = made.line(
        "step",
        "value",
        source=data_source({"step": [s.step for s in run.drawn], "value": shown}),
        line_width=2,
        line_color=VERDICTS["runs"],
        name=curve.unit,
    )
    made.y_range.start = 1.15 * min([0, *finite])
    made.y_range.end = 1.15 * max(finite, default=0) or 1
    tip = [("step", "@step"), (curve.unit, f"@value{{{curve.form}}}")]
    made.add_tools(hover(tip, renderers=[drawn], mode="vline"))
    return made


# The cluster map: a cell for each GPU, node by node, coloured by its group.


AXES = tuple(axis.name for axis in rank_order_axes())
EXPERT = "expert"
ROWS_UP_TO = 8  # nodes with a named row each; more are drawn as tiles
LABELLED_UP_TO = 128  # GPUs with their rank written in the cell
GAP = 0.5


def map_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes by which the map can be coloured; expert ranks where experts are sharded."""
    return (*AXES, EXPERT) if plan.strategy.expert > 1 else AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Lay out columns x rows of nodes, each wide x high cells."""

    columns: int
    rows: int
    wide: int
    high: int


def grid_of(nodes: int, gpus_per_node: int) -> Grid:
    """Return a grid about twice as wide as high, for any number of nodes."""
    if nodes <= ROWS_UP_TO:
        return Grid(
            columns=1, rows=nodes, wide=min(gpus_per_node, 16), high=-(-gpus_per_node // 16)
        )
    high = max(n for n in range(1, math.isqrt(gpus_per_node) + 1) if gpus_per_node % n == 0)
    wide = gpus_per_node // high
    columns = min(nodes, max(1, round(math.sqrt(nodes * 2 * (high + GAP) / (wide + GAP)))))
    return Grid(columns=columns, rows=-(-nodes // columns), wide=wide, high=high)


def cluster_map(plan: Plan, experts: int = 0) -> Figure:
    """Draw the cluster of all islands that the plan covers; their layouts are the same. experts: of
    a layer, which the tooltip shares out over expert ranks."""
    copies = max(1, len(plan.island_numbers))
    nodes, cells = plan.nodes * copies, len(plan.ranks) * copies
    grid = grid_of(nodes, plan.gpus_per_node)
    columns = _columns(plan, copies, grid)
    if cells <= LABELLED_UP_TO:
        columns["ink"] = ["#ffffff"] * cells  # page.js picks it by the cell's own colour
    width = grid.columns * (grid.wide + GAP) - GAP
    depth = grid.rows * (grid.high + GAP) - GAP
    made = plot(
        name="cluster",
        height=int(70 + min(620, max(44 * depth, 90))) if nodes <= ROWS_UP_TO else 560,
        x_range=(-0.6, width - 0.4),
        y_range=(depth - 0.3, -0.7),
        lod_threshold=None,
    )
    degree = plan.strategy.pipeline
    mapper = Model(
        "LinearColorMapper", palette=list(group_colors(degree)), low=-0.5, high=degree - 0.5
    )
    source = data_source(columns)
    drawn = made.rect(
        "x",
        "y",
        width=0.94,
        height=0.94,
        source=source,
        fill_color=field_of("pipeline", transform=mapper),
        line_width=0,
        nonselection_fill_alpha=0.12,
        name="cells",
    )
    if cells <= LABELLED_UP_TO:
        made.text(
            "x",
            "y",
            text="rank",
            source=source,
            text_align="center",
            text_baseline="middle",
            text_font_size="11px",
            text_color=field_of("ink"),
            nonselection_text_alpha=0.25,
        )
    made.add_tools(
        _cell_hover(plan, source, drawn, copies, experts), Model("TapTool", renderers=[drawn])
    )
    callback = Model("CustomJS", args={"source": source}, code=PEERS)
    source.selected.js_property_callbacks = {"change:indices": [callback]}
    made.grid.visible = False
    made.xaxis.visible = False
    if nodes <= ROWS_UP_TO:
        middle = [n * (grid.high + GAP) + (grid.high - 1) / 2 for n in range(nodes)]
        made.yaxis.ticker = fixed_ticker(middle)
        of = [f"island {n // plan.nodes}, " if copies > 1 else "" for n in range(nodes)]
        made.yaxis.major_label_overrides = {
            m: f"{of[n]}node {n % plan.nodes}" for n, m in enumerate(middle)
        }
        made.yaxis.axis_line_color = made.yaxis.major_tick_line_color = None
    else:
        made.yaxis.visible = False
    return made


def _columns(plan: Plan, copies: int, grid: Grid) -> dict[str, object]:
    """Return the position and coordinates of every cell; node: inside its island."""
    island = np.repeat(np.arange(copies), len(plan.ranks))

    def each(name: str) -> np.ndarray:
        return np.tile(np.array([getattr(rank, name) for rank in plan.ranks]), copies)

    slot, place = each("slot"), each("node") + island * plan.nodes
    x = (place % grid.columns) * (grid.wide + GAP) + slot % grid.wide
    y = (place // grid.columns) * (grid.high + GAP) + slot // grid.wide
    return {
        "x": x.astype(np.float32),
        "y": y.astype(np.float32),
        "rank": each("rank").astype(np.int32),
        "island": island.astype(np.int16),
        "node": each("node").astype(np.int32),
        "slot": slot.astype(np.int16),
        **{axis: each(axis).astype(np.int32) for axis in AXES},
        **_expert_columns(plan, copies),
    }


def _expert_columns(plan: Plan, copies: int) -> dict[str, object]:
    """Return each cell's expert rank, and the replica of the experts that it belongs to; nothing
    for a layout without expert ranks."""
    if EXPERT not in map_axes(plan):
        return {}
    found = np.array([plan.expert_coordinates(rank) for rank in plan.ranks], dtype=np.int32)
    return {
        EXPERT: np.tile(found[:, 0], copies),
        "expert_replica": np.tile(found[:, 1], copies),
    }


def _cell_hover(plan: Plan, source: Model, cells: object, islands: int, experts: int) -> Model:
    """Create the tooltip of a rank: position, groups, layers and parameter bytes."""
    resident = {(r.pipeline, r.tensor): r.parameter_bytes for r in plan.ranks}
    layers = Model("CustomJSHover", args={"held": layer_ranges(plan)}, code="return held[value]")
    table = [
        [resident[p, t] / 2**30 for t in range(plan.strategy.tensor)]
        for p in range(plan.strategy.pipeline)
    ]
    share = Model(
        "CustomJSHover",
        args={"table": table, "source": source},
        code="""
const i = source.data.rank.indexOf ? source.data.rank.indexOf(value) : value
return table[source.data.pipeline[i]][source.data.tensor[i]].toFixed(2) + ' GiB'""",
    )
    degrees = plan.strategy
    groups = "pipeline @pipeline, tensor @tensor, data @data"
    groups += ", context @context" if degrees.context > 1 else ""
    rows = [
        ("", "<b>rank @rank</b>"),
        ("place", ("island @island, " if islands > 1 else "") + "node @node, slot @slot"),
        ("groups", groups + (", expert @expert" if degrees.expert > 1 else "")),
        ("layers", "@pipeline{custom}"),
    ]
    formatters = {"@pipeline": layers, "@rank": share}
    if degrees.expert > 1:
        ranges = expert_ranges(plan, experts)
        formatters["@expert"] = Model(
            "CustomJSHover", args={"held": ranges}, code="return held[value]"
        )
        rows.append(("experts", "@expert{custom}"))
    rows.append(("parameters", "@rank{custom}"))
    return hover(rows, renderers=[cells], formatters=formatters)


# A tap on one GPU selects its peers: GPUs that differ in one coordinate only or hold other experts
# of the same replica, and in other islands those with all the same coordinates, through the store.
PEERS = """
const [tapped, ...others] = source.selected.indices
if (tapped == null || others.length > 0) return
const {pipeline, tensor, data, context, island, expert_replica} = source.data
const peers = [tapped]
for (let i = 0; i < pipeline.length; i++) {
  if (i == tapped) continue
  const others = (pipeline[i] != pipeline[tapped]) + (tensor[i] != tensor[tapped])
    + (data[i] != data[tapped]) + (context[i] != context[tapped])
  const experts = expert_replica != null && pipeline[i] == pipeline[tapped]
    && expert_replica[i] == expert_replica[tapped]
  if (island[i] == island[tapped] ? others == 1 || experts : others == 0) peers.push(i)
}
if (peers.length > 1) source.selected.indices = peers
"""


def expert_ranges(plan: Plan, experts: int) -> list[str]:
    """Return which of each layer's experts an expert rank holds: "0 to 15". experts: of a layer
    that has the most."""
    held = experts // plan.strategy.expert
    return [
        str(first) if held == 1 else f"{first} to {first + held - 1}"
        for first in range(0, held * plan.strategy.expert, held or 1)
    ]


def layer_ranges(plan: Plan) -> list[str]:
    """Return each pipeline rank's layers, "embedding ... model.layers.6"; two ranges under
    DualPipeV."""
    out = []
    for pipeline in range(plan.strategy.pipeline):
        stages = [stage.layers for stage in plan.stages if stage.pipeline_rank == pipeline]
        out.append(
            ", ".join(
                names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" for names in stages
            )
        )
    return out
