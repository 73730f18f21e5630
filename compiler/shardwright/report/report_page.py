"""Render the page: the plan's numbers as text, charts as BokehJS's JSON, styles and scripts in one
file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import shardwright
from shardwright.compile.compiled_folder import CompiledFolder
from shardwright.cost.cost_constants import default_constants
from shardwright.cost.diloco_costs import IslandsCost, inner_step_seconds, islands_cost
from shardwright.cost.goodput import goodput
from shardwright.cost.layout_costs import training_estimate
from shardwright.cost.peak_memory import bytes_with_headroom
from shardwright.cost.scoring_cost import scoring_cost
from shardwright.data.dataset import recorded_step_count
from shardwright.layout.layout import Layout, in_layer_collectives_text
from shardwright.layout.layout_estimate import Training
from shardwright.layout.planning_problem import Problem
from shardwright.models.expert_modules import experts_per_layer
from shardwright.monitor.run_files import read_save_statistics
from shardwright.plan.plan import plan_document
from shardwright.recipe.recipe_types import weights_summary
from shardwright.report import bokeh_document, report_charts
from shardwright.report.bokeh_document import Figure, chart_json
from shardwright.report.diloco_charts import IslandsRun, loss_chart, read_islands_run, waits_chart
from shardwright.report.layout_space import LayoutSpace, layout_space
from shardwright.report.plan_sentences import (
    error_bar_text,
    goodput_lines,
    islands_cost_lines,
    not_calibrated_text,
    objective_lines,
    recovery_lines,
    rejected_faster_text,
    slowdown_reason,
    slowdown_text,
    slower_region_text,
)
from shardwright.report.report_charts import (
    EXPERT,
    cluster_map,
    expert_ranges,
    group_colors,
    layer_ranges,
    map_axes,
    step_curve_chart,
    step_curves_of,
)
from shardwright.report.run_results import MeasuredRun, read_run
from shardwright.report.step_timeline import StepTimeline, sampled_ranks, step_timeline
from shardwright.search.recovery_goodput import recovery_goodput
from shardwright.utils.installation import templates_folder
from shardwright.utils.json_values import JsonObject, JsonValue, copy_shared_fields
from shardwright.utils.number_format import format_days, format_number

GIB = 2**30
LEGEND_UP_TO = 16  # groups with a swatch each; of more, the first and the last
MAX_SLOWER_REGIONS = 8
ARTIFACTS: dict[str, str] = {
    "plan.json": "every decision: the lock, and all that the runtime reads",
    "ds_config.json": "DeepSpeed's configuration",
    "ds_config.autotp.json": "the same tensor-parallel map for DeepSpeed's AutoTP",
    "megatron_args.sh": "the same plan as options of Megatron-LM's pretrain_gpt.py",
    "recipe.resolved.json": "the recipe with every default",
    "model/config.json": "the complete Hugging Face configuration",
    "train.py": "what deepspeed starts on each rank",
    "launch.sh": "starts the run without shardwright run",
}


def render_page(subject: CompiledFolder) -> tuple[str, StepTimeline]:
    """Return the page's HTML, and the simulated step that it shows."""
    plan = subject.plan
    timeline = step_timeline(subject.layout, plan.predicted.time)
    space = layout_space(
        Problem(recipe=subject.recipe, graph=subject.graph, cluster=subject.cluster),
        subject.estimate,
    )
    run = read_run(subject.folder, plan)
    islands = read_islands_run(subject)
    drawn = dict(_charts(subject, timeline, space, run, islands))
    training = training_in(subject)
    totals = totals_of(subject, training)
    estimate = dataclasses.replace(subject.estimate, training=training)
    problem, saves = copy_shared_fields(Problem, subject), read_save_statistics(subject.folder)
    expected = goodput(
        problem, estimate, measured=None if saves is None else saves.gbytes_per_second
    )
    recovery = recovery_goodput(problem, estimate, expected)
    figures = PlanNumbers(cast(JsonObject, json.loads(json.dumps(dataclasses.asdict(plan)))))
    environment = Environment(
        loader=FileSystemLoader(templates_folder() / "report"),
        undefined=StrictUndefined,
        autoescape=True,
    )
    environment.globals |= {"n": figures.shown, "g": figures.gib, "difference": difference_text}
    outer, axes = _outer_cost(subject), map_axes(plan)
    is_best = bool(space.best) and space.best == subject.plan.strategy
    document = plan_document(plan)
    html = environment.get_template("page.html.j2").render(
        plan=plan,
        recipe=subject.recipe,
        layout=plan.strategy.describe(),
        weights=weights_summary(subject.recipe.model.weights),
        verdict=_verdict(subject),
        objective_lines=objective_lines(plan.training, scoring_cost(problem, estimate)),
        warnings=[d for d in subject.estimate.diagnostics if d.severity == "warning"],
        error=subject.estimate.error,
        error_bar_text=error_bar_text(subject.estimate.error),
        not_calibrated_text=not_calibrated_text(subject.estimate.error.step_time_reason),
        rejected_faster_layouts=[
            rejected_faster_text(found) for found in space.rejected_faster_layouts if is_best
        ],
        totals=totals,
        goodput=expected,
        goodput_lines=[] if expected is None else goodput_lines(expected),
        recovery=recovery,
        recovery_lines=[] if recovery is None else recovery_lines(recovery),
        predicted_goodput=goodput(problem, estimate),
        saves=saves,
        in_words=format_days,
        m=figures.marked if totals.is_plans else lambda key, text: text,
        is_same=not subject.has_stale_prediction,
        now=subject.estimate,
        version=shardwright.__version__,
        timeline=timeline,
        sampled_ranks=sampled_ranks(timeline, report_charts.MOST_BARS),
        space=space,
        slower_regions=space.slower_regions[:MAX_SLOWER_REGIONS],
        slower_region_text=slower_region_text,
        slowdown_text=slowdown_text,
        slowdown_reason=slowdown_reason,
        words=Layout.describe,
        inside=in_layer_collectives_text(plan.strategy),
        run=run,
        islands=islands,
        outer=outer,
        outer_words=[] if outer is None else islands_cost_lines(outer),
        held=layer_ranges(plan),
        axes=[_axis(subject, axis) for axis in axes],
        first_axis=next((axis for axis in axes if getattr(plan.strategy, axis) > 1), axes[0]),
        step_curves=step_curves_of(run),
        keys={name: report_charts.keys(chart) for name, chart in drawn.items()},
        artifacts=list(_artifacts(subject.folder)),
        style=Markup((templates_folder() / "report/page.css").read_text("utf-8")),
        script=Markup((templates_folder() / "report/page.js").read_text("utf-8")),
        bokeh=Markup(bokeh_document.script()),
        items=_embedded({name: chart_json(name, chart) for name, chart in drawn.items()}),
        palettes=_embedded(
            {
                axis: {"degree": degree, "colours": list(group_colors(degree))}
                for axis, degree in ((axis, getattr(plan.strategy, axis)) for axis in axes)
            }
        ),
        figures=_embedded(
            {key: document[key] for key in ("name", "recipe_hash", "strategy", "predicted")}
        ),
    )
    return html, timeline


def _charts(
    subject: CompiledFolder,
    timeline: StepTimeline,
    space: LayoutSpace,
    run: MeasuredRun | None,
    islands: IslandsRun | None,
) -> Iterator[tuple[str, Figure]]:
    plan = subject.plan
    yield "cluster", cluster_map(plan, experts_per_layer(subject.graph))
    yield "memory", report_charts.memory_chart(plan.predicted.memory)
    yield "timeline", report_charts.timeline_chart(timeline)
    yield "parts", report_charts.parts_chart(timeline)
    yield (
        "space",
        report_charts.space_chart(
            space, plan.strategy.describe(), plan.predicted.memory.capacity_bytes
        ),
    )
    if run is not None:
        yield "loss", report_charts.loss_chart(run)
        yield "seconds", report_charts.seconds_chart(run, plan.predicted.time.step_seconds)
        for name in step_curves_of(run):
            yield name, step_curve_chart(run, name)
    if islands is not None:
        cost = _outer_cost(subject)
        assert cost is not None, "a run of islands has a recipe of them"
        yield "islands-loss", loss_chart(islands)
        yield "islands-waits", waits_chart(islands, cost.exposed_seconds)


def _outer_cost(subject: CompiledFolder) -> IslandsCost | None:
    step = inner_step_seconds(subject.plan.predicted.time)
    return islands_cost(subject.recipe, subject.plan.model.total_parameters, step)


class PlanNumbers:
    """Mark numbers of plan.json with their path: `<data data-key="predicted.time.mfu"
    value="0.4">`."""

    def __init__(self, document: JsonObject) -> None:
        self._document = document

    def shown(self, key: str, form: str = "{}", scale: float = 1) -> Markup:
        value: JsonValue = self._document
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else cast(JsonObject, value)[part]
        assert isinstance(value, int | float), key
        text = form.format(value if scale == 1 else value * scale)
        return Markup('<data data-key="{}" value="{}">{}</data>').format(
            key, json.dumps(value), text
        )

    def marked(self, key: str, text: str) -> Markup:
        """Mark text of the caller with a number's path."""
        return self.shown(key, text.replace("{", "{{").replace("}", "}}"))

    def gib(self, key: str) -> Markup:
        return self.shown(key, "{:,.1f}", 1 / GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """Describe the whole training in words.

    is_known: the number of steps is known
    is_plans: plan.json has the number of steps, which it lacks where the recipe counts epochs
    cost: None without a price
    """

    steps: str
    duration: str
    device_hours: str
    cost: str | None
    is_known: bool
    is_plans: bool


def training_in(subject: CompiledFolder) -> Training:
    """Return the training totals, with the steps of epochs as counted in the prepared folder."""
    plan = subject.plan
    if plan.training.epochs is None:
        return plan.predicted.training
    islands = subject.recipe.cluster.islands
    return training_estimate(
        recorded_step_count(plan, subject.folder), subject.cluster, plan.predicted.time, islands
    )


def totals_of(subject: CompiledFolder, training: Training) -> TrainingTotals:
    return TrainingTotals(
        steps=f"{training.steps:,}",
        duration=format_days(training.days),
        device_hours=format_number(training.gpu_hours, 4),
        cost=None if training.cost is None else f"{training.cost:,.0f}",
        is_known=training.steps > 0,
        is_plans=subject.plan.training.epochs is None,
    )


def _verdict(subject: CompiledFolder) -> tuple[str, str]:
    """Return a word for how safe the memory is, and a sentence that explains it."""
    memory, pinned = subject.plan.predicted.memory, subject.recipe.parallelism.memory_headroom
    device = "rank" if subject.plan.is_cpu else "GPU"
    if not memory.fits:
        return (
            "does not fit",
            f"It does not fit: the {device} that needs the most memory would need "
            f"{memory.peak_bytes / GIB:,.1f} of {memory.capacity_bytes / GIB:,.1f} GiB.",
        )
    free = f"{1 - memory.peak_bytes / memory.capacity_bytes:.0%} of its memory"
    holder = f"the {device} that needs the most has {free} left"
    margin = default_constants().memory_headroom if pinned is None else pinned
    known = subject.estimate.error.memory is not None
    if pinned is None and memory.peak_bytes > bytes_with_headroom(memory.capacity_bytes):
        why = "which 1 prediction in 20 is off by" if known else "kept for errors of the prediction"
        return "tight", f"It may run out of memory: {holder}, less than the {margin:.0%} {why}."
    if pinned is not None:
        return "fits", f"It fits: {holder}, and the recipe asks for {margin:.0%}."
    why = (
        "19 predictions in 20 are off by less than"
        if known
        else "errors of the prediction are allowed"
    )
    return "fits", f"It fits: {holder}, and {why} {margin:.0%}."


def _axis(subject: CompiledFolder, axis: str) -> JsonObject:
    """Return the legend of one colouring of the cluster."""
    plan = subject.plan
    degree: int = getattr(plan.strategy, axis)
    colors = group_colors(degree)
    noun = "stage" if axis == "pipeline" else f"{axis} rank"
    shown = list(range(degree)) if degree <= LEGEND_UP_TO else [0, degree - 1]
    held = {
        "pipeline": layer_ranges(plan),
        EXPERT: [
            f"experts {each}" for each in expert_ranges(plan, experts_per_layer(subject.graph))
        ],
    }.get(axis)
    return {
        "name": axis,
        "degree": degree,
        "swatches": [
            {
                "color": colors[-1 if group == degree - 1 else group],
                "text": f"{noun} {group}" + ("" if held is None else f": {held[group]}"),
            }
            for group in shown
        ],
        "gradient": ", ".join(colors[:: max(1, len(colors) // 12)])
        if degree > LEGEND_UP_TO
        else "",
    }


def _artifacts(folder: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yield the path, bytes, start of the sha256 and purpose of each file that `compile` wrote."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        root = name.split("/")[0]
        if name in ARTIFACTS or root in ("accelerate", "launch", "model", "tokenizer"):
            content = path.read_bytes()
            yield (
                name,
                len(content),
                hashlib.sha256(content).hexdigest()[:12],
                ARTIFACTS.get(name, ""),
            )


def difference_text(measured: float, predicted: float) -> str:
    """Return how far measured is from predicted; "" where nothing was predicted."""
    return f"{measured / predicted - 1:+.1%}" if predicted else ""


def _embedded(document: Mapping[str, object]) -> Markup:
    """Encode JSON for a script element, which nothing in it can end."""
    text = json.dumps(document, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
