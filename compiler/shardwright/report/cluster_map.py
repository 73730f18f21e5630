"""The cluster as it stands: a cell a GPU, node by node, coloured by the group that it belongs
to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    HoverTool,
    LinearColorMapper,
    TapTool,
)
from bokeh.plotting import figure

from shardwright.layout.axes import rank_order_axes
from shardwright.plan.plan import Plan
from shardwright.report.chart_colors import group_colors
from shardwright.report.report_charts import hover, plot

AXES = tuple(axis.name for axis in rank_order_axes())
ROWS_UP_TO = 8  # nodes: each is a row of its own, with its name; more are tiles
LABELLED_UP_TO = 128  # GPUs with their rank written in the cell
GAP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """columns x rows of nodes, each wide x high cells."""

    columns: int
    rows: int
    wide: int
    high: int


def grid_of(nodes: int, gpus_per_node: int) -> Grid:
    """About twice as wide as high, whatever the number of nodes."""
    if nodes <= ROWS_UP_TO:
        return Grid(
            columns=1, rows=nodes, wide=min(gpus_per_node, 16), high=-(-gpus_per_node // 16)
        )
    high = max(n for n in range(1, math.isqrt(gpus_per_node) + 1) if gpus_per_node % n == 0)
    wide = gpus_per_node // high
    columns = min(nodes, max(1, round(math.sqrt(nodes * 2 * (high + GAP) / (wide + GAP)))))
    return Grid(columns=columns, rows=-(-nodes // columns), wide=wide, high=high)


def cluster_map(plan: Plan) -> figure:
    """Of all islands, where the plan is of them; their layouts are the same."""
    copies = 1 if plan.outer is None or plan.outer.island is not None else plan.outer.islands
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
    mapper = LinearColorMapper(palette=list(group_colors(degree)), low=-0.5, high=degree - 0.5)
    source = ColumnDataSource(columns)
    drawn = made.rect(
        "x",
        "y",
        width=0.94,
        height=0.94,
        source=source,
        fill_color={"field": "pipeline", "transform": mapper},
        line_width=0,
        nonselection_fill_alpha=0.12,
        name="cells",
    )
    if cells <= LABELLED_UP_TO:
        _label_cells(made, source)
    made.add_tools(_cell_hover(plan, source, drawn, copies), TapTool(renderers=[drawn]))
    source.selected.js_on_change("indices", CustomJS(args={"source": source}, code=PEERS))
    made.grid.visible = False
    made.xaxis.visible = False
    if nodes <= ROWS_UP_TO:
        middle = [n * (grid.high + GAP) + (grid.high - 1) / 2 for n in range(nodes)]
        made.yaxis.ticker = middle
        of = [f"island {n // plan.nodes}, " if copies > 1 else "" for n in range(nodes)]
        made.yaxis.major_label_overrides = {
            m: f"{of[n]}node {n % plan.nodes}" for n, m in enumerate(middle)
        }
        made.yaxis.axis_line_color = made.yaxis.major_tick_line_color = None
    else:
        made.yaxis.visible = False
    return made


def _columns(plan: Plan, copies: int, grid: Grid) -> dict[str, object]:
    """Of every cell: where it is drawn, and who it is. node: in its island."""
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
    }


def _label_cells(made: figure, source: ColumnDataSource) -> None:
    made.text(
        "x",
        "y",
        text="rank",
        source=source,
        text_align="center",
        text_baseline="middle",
        text_font_size="11px",
        text_color="ink",
        nonselection_text_alpha=0.25,
    )


def _cell_hover(plan: Plan, source: ColumnDataSource, cells: object, islands: int) -> HoverTool:
    """A rank's place, groups, layers and bytes of parameters."""
    resident = {(r.pipeline, r.tensor): r.parameter_bytes for r in plan.ranks}
    layers = CustomJSHover(args={"held": layer_ranges(plan)}, code="return held[value]")
    table = [
        [resident[p, t] / 2**30 for t in range(plan.strategy.tensor)]
        for p in range(plan.strategy.pipeline)
    ]
    share = CustomJSHover(
        args={"table": table, "source": source},
        code="""
const i = source.data.rank.indexOf ? source.data.rank.indexOf(value) : value
return table[source.data.pipeline[i]][source.data.tensor[i]].toFixed(2) + ' GiB'""",
    )
    return hover(
        [
            ("", "<b>rank @rank</b>"),
            ("place", ("island @island, " if islands > 1 else "") + "node @node, slot @slot"),
            ("groups", "pipeline @pipeline, tensor @tensor, data @data"),
            ("layers", "@pipeline{custom}"),
            ("parameters", "@rank{custom}"),
        ],
        renderers=[cells],
        formatters={"@pipeline": layers, "@rank": share},
    )


# A tap on one GPU shows all that it talks to: those that share two of its three coordinates, and
# all three in the other islands, through the store.
PEERS = """
const [tapped, ...others] = source.selected.indices
if (tapped == null || others.length > 0) return
const {pipeline, tensor, data, island} = source.data
const peers = [tapped]
for (let i = 0; i < pipeline.length; i++) {
  const same = (pipeline[i] == pipeline[tapped]) + (tensor[i] == tensor[tapped])
    + (data[i] == data[tapped])
  if (same == (island[i] == island[tapped] ? 2 : 3)) peers.push(i)
}
if (peers.length > 1) source.selected.indices = peers
"""


def layer_ranges(plan: Plan) -> list[str]:
    """Per pipeline rank: "embedding ... model.layers.6"; two runs of layers under DualPipeV."""
    out = []
    for pipeline in range(plan.strategy.pipeline):
        stages = [stage.layers for stage in plan.stages if stage.pipeline_rank == pipeline]
        out.append(
            ", ".join(
                names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}" for names in stages
            )
        )
    return out
