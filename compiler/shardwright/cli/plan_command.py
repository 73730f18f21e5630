"""`shardwright plan R`: search the layouts and rank them. `plan MODEL --gpu G --nodes N` does it
without a recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli import recipe_writer
from shardwright.cli.command_options import add_json, add_overrides, gpu_from_catalogue, positive
from shardwright.cli.estimate_command import (
    estimate_json,
    islands_rows,
    measured_run_note,
    measurement_note_lines,
    measurements_json,
    recovery_rows,
    scoring_rows,
)
from shardwright.cli.plan_summary import summary_lines, wrapped_lines, wrapped_rows
from shardwright.cli.terminal import (
    error,
    labelled_lines,
    print_diagnostics,
    print_refusal,
    table_lines,
)
from shardwright.cost.goodput import Goodput, goodput
from shardwright.cost.prediction_errors import error_benchmark
from shardwright.cost.scoring_cost import scoring_cost
from shardwright.diagnostics import Refusal
from shardwright.layout.axes import AXES, Axis, value_text
from shardwright.layout.layout import Layout, auto_by_default_axes
from shardwright.layout.layout_estimate import Estimate, Memory
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import weights_summary
from shardwright.report.plan_sentences import (
    chosen_kernels_text,
    cluster_bound_text,
    error_source_text,
    flops_source_text,
    larger_batch_text,
    low_precision_accumulation_text,
    memory_copy_text,
    not_calibrated_text,
    other_engine_text,
    rejected_faster_text,
    slowdown_reason,
    slowdown_text,
    slower_region_text,
    smaller_cluster_batch_text,
)
from shardwright.search.accumulation_dtype_choice import low_precision_accumulation
from shardwright.search.cluster_sizing import (
    ClusterSizing,
    LargerBatch,
    SmallerClusterBatch,
    larger_batch,
    smaller_cluster_batch,
)
from shardwright.search.engine_choice import other_engine
from shardwright.search.kernel_choice import chosen_kernels
from shardwright.search.layout_comparison import (
    SlowerRegion,
    binding_constraint,
    pareto_front,
    slower_regions,
)
from shardwright.search.layout_search import SearchResult, baselines, choose_layout, search
from shardwright.search.recovery_goodput import RecoveryGoodput, recovery_goodput
from shardwright.search.rejected_faster_layouts import rejected_faster_layouts
from shardwright.utils.json_values import JsonDocument, strict_json
from shardwright.utils.number_format import GIB, format_number, rank_or_gpu

if TYPE_CHECKING:
    from shardwright.recipe.recipe_types import Recipe


MAX_SLOWER_REGIONS = 5  # regions that the page names; --json has them all


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE|MODEL",
        help="a recipe file; or a hub id or model folder, with --gpu",
    )
    add_overrides(parser)
    parser.add_argument(
        "--top",
        type=positive,
        default=10,
        metavar="N",
        help="how many layouts to show (default 10)",
    )
    parser.add_argument(
        "--pin",
        type=positive,
        metavar="ROW",
        help="pin the layout of this row of the table in the recipe",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="with --pin: write the pinned recipe here instead of in place",
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help=(
            "add every column, why the other layouts are slower or ruled out, and where the "
            "predictions' error is from; needs about 150 columns"
        ),
    )
    add_json(parser)
    model = parser.add_argument_group("for a MODEL instead of a recipe")
    model.add_argument(
        "--gpu", metavar="NAME", help="a GPU from the catalogue, such as h100 or a100-sxm4-40gb"
    )
    model.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help=f"number of nodes (default {recipe_writer.NODES})",
    )
    model.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        help=f"GPUs on each node (default {recipe_writer.GPUS_PER_NODE})",
    )
    model.add_argument(
        "--sequence-length",
        type=positive,
        metavar="S",
        help=(
            "tokens per sequence (default: the model's longest, at most "
            f"{recipe_writer.MAX_ASSUMED_SEQUENCE_LENGTH})"
        ),
    )
    model.add_argument(
        "--global-batch-size",
        type=positive,
        metavar="B",
        help="sequences per step (default: about 4 M tokens, a multiple of the number of GPUs)",
    )
    model.add_argument(
        "--precision", metavar="P", help=f"bf16, fp16 or fp32 (default {recipe_writer.PRECISION})"
    )


def run_plan(args: argparse.Namespace) -> int:
    """Exit 1 where no layout is feasible; the rejected regions are printed all the same."""
    from shardwright.compile.recipe_compiler import resolve_recipe
    from shardwright.recipe.recipe_loader import load_recipe

    model = recipe_writer.model_source(args)
    if wrong := recipe_writer.model_flags_error(args, model):
        error(wrong)
        return 1
    text = ""
    args.gpu = args.gpu and gpu_from_catalogue(args.gpu)
    if model is None:
        recipe = load_recipe(Path(args.recipe), args.overrides)
    else:
        text = recipe_writer.draft_yaml(args, model)
        recipe = recipe_writer.load_model_recipe(
            text, args.overrides, recipe_writer.flags_by_recipe_key(args, model)
        )
    problem, sizing = resolve_recipe(recipe, prices_other_engines=True)
    recipe = problem.recipe
    batch = None if sizing is None else smaller_cluster_batch(problem, sizing)
    larger = None if sizing is None else larger_batch(problem, sizing)
    result = search(problem)
    rows = plan_table_rows(problem, result, args.top)
    if args.pin is not None and (wrong := _pin_error(args, rows)):
        error(wrong)
        return 1
    if args.json:
        document = plan_json(args.recipe, problem, rows, result, sizing, batch, larger)
        if model is not None:
            document["planned_as"] = recipe_writer.planned_as(recipe)
            document["assumed"] = recipe_writer.assumed_keys(args)
        print(strict_json({**document, **measurements_json(recipe, problem.graph, None)}))
    else:
        heading, weights = recipe_writer.heading(args, text), weights_summary(recipe.model.weights)
        lines = (
            [
                *heading,
                *plan_text_lines(problem, rows, result, sizing, batch, larger),
                *measurement_note_lines(recipe, problem.graph, problem.cluster),
            ]
            if args.wide
            else [
                *wrapped_lines(heading if heading or not result.ranked else [weights, ""]),
                *plan_summary_lines(problem, rows, result, sizing, batch),
            ]
        )
        print("\n".join(lines), flush=True)
        print_diagnostics(result.ranked[0].diagnostics if result.ranked else (), recipe.source)
    if args.pin is not None:
        _pin(args, recipe, text, rows[args.pin - 1])
    if result.ranked:
        return 0
    try:
        choose_layout(problem)
    except Refusal as refusal:
        print_refusal(refusal, recipe.source)
    return 1


def plan_table_rows(problem: Problem, result: SearchResult, top: int) -> list[PlanRow]:
    """Return the best layouts, the faster but rejected ones, and "what you would run today"
    (pipeline 1, tensor 1, ZeRO-2 and 3): below the ranking where the pins forbid those."""
    recipe, todays = problem.recipe, baselines(problem)
    place = {estimate.strategy: i for i, estimate in enumerate(result.ranked)}
    rejected = {each.strategy for each in rejected_faster_layouts(recipe, result.ranked)}
    baseline_layouts = {e.strategy for e in todays}
    chosen = {e.strategy: e for e in result.ranked[:top]}
    chosen |= {e.strategy: e for e in todays if e.strategy in place}
    chosen |= {e.strategy: e for e in result.ranked if e.strategy in rejected}
    shown = sorted(chosen.values(), key=lambda e: place[e.strategy])
    shown += [e for e in todays if e.strategy not in place]
    return [
        _row(
            problem,
            e,
            is_baseline=e.strategy in baseline_layouts,
            ranked=e.strategy in place,
            is_faster_but_rejected=e.strategy in rejected,
        )
        for e in shown
    ]


def _row(
    problem: Problem,
    estimate: Estimate,
    *,
    is_baseline: bool,
    ranked: bool,
    is_faster_but_rejected: bool,
) -> PlanRow:
    s = estimate.strategy
    notes = [axis.table_label.format(value) for axis, value in s.enabled_axes() if axis.table_label]
    notes += [f"today's ZeRO-{s.zero_stage}"] if is_baseline else []
    notes += ["faster, rejected"] if is_faster_but_rejected else []
    notes += [ran] if (ran := measured_run_note(problem.recipe, problem.graph, s)) else []
    broken = [d.code for d in estimate.diagnostics if d.severity == "error"]
    notes += broken or ([] if ranked or _is_within_pins(problem.recipe, s) else ["not as pinned"])
    return PlanRow(estimate=estimate, note=", ".join(notes), broken=bool(broken), ranked=ranked)


def _is_within_pins(recipe: Recipe, s: Layout) -> bool:
    return all(axis.pin(recipe) in (None, getattr(s, axis.name)) for axis in auto_by_default_axes())


def plan_json(
    path: str,
    problem: Problem,
    rows: list[PlanRow],
    result: SearchResult,
    sizing: ClusterSizing | None,
    batch: SmallerClusterBatch | None,
    larger: LargerBatch | None,
) -> JsonDocument:
    recipe, ranked = problem.recipe, result.ranked
    best = ranked[0] if ranked else None
    expected = None if best is None else expected_goodput(problem, best)
    document: JsonDocument = {
        "recipe": path,
        "plans": [estimate_json(path, row.estimate) for row in rows],
        "rejected": result.rejected,
        "skipped": [
            {
                "least_step_seconds": least,
                **{axis.name: value for axis, value in s.values().items()},
            }
            for least, s in result.skipped
        ],
        "slower_regions": [
            _slower_region_json(region) for region in slower_regions(recipe, ranked, result.skipped)
        ],
        "pareto": [estimate_json(path, estimate) for estimate in pareto_front(ranked)],
        "binding": None
        if best is None
        else binding_constraint(best, result.fastest_over_memory(best)),
        "measured_error": {
            "step_time": None if best is None else best.error.step_time,
            "memory": None if best is None else best.error.memory,
            "runs": error_benchmark().time.runs,
            "projects": error_benchmark().projects,
        },
        "rejected_faster_layouts": rejected_faster_layouts(recipe, ranked),
        "low_precision_accumulation": low_precision_accumulation(problem),
        "kernels": chosen_kernels(problem),
        "target": recipe.target,
        "other_engine": None if best is None else other_engine(problem, best),
        "search_seconds": result.seconds,
        "goodput": None if expected is None else expected[0],
        "recovery": None if expected is None else expected[1],
        "scoring": None if best is None else scoring_cost(problem, best),
    }
    if sizing is not None:
        document["sizing"] = {
            **dataclasses.asdict(sizing),
            "bound": _bound(recipe, sizing, batch),
            "smaller_cluster_batch": batch,
            "larger_batch": larger,
        }
    return document


def expected_goodput(
    problem: Problem, best: Estimate
) -> tuple[Goodput | None, RecoveryGoodput | None]:
    """Return the goodput of a layout with restarts by hand, and with `run --supervise`."""
    by_hand = goodput(problem, best)
    return by_hand, recovery_goodput(problem, best, by_hand)


def _expected_rows(problem: Problem, best: Estimate) -> list[tuple[str, str]]:
    """Return (name, text) rows of what the recipe's own copies in memory cost, of what its
    launch.recovery is worth, and of what is scored before the first step; [] where it has none."""
    by_hand, recovery = expected_goodput(problem, best)
    copies = by_hand and by_hand.memory
    rows = [("memory", memory_copy_text(copies))] if copies else []
    return [*rows, *recovery_rows(recovery), *scoring_rows(problem, best)]


def _slower_region_json(region: SlowerRegion) -> JsonDocument:
    fields = dataclasses.asdict(region)
    del fields["where"]
    return {**dict(region.where), **fields}


def _bound(recipe: Recipe, sizing: ClusterSizing, batch: SmallerClusterBatch | None) -> str:
    return (
        cluster_bound_text(sizing)
        if batch is None
        else smaller_cluster_batch_text(batch, recipe.training.global_batch_size, sizing.nodes)
    )


def _sizing_text(recipe: Recipe, sizing: ClusterSizing, batch: SmallerClusterBatch | None) -> str:
    days = f"{sizing.days:.3g} days of at most {sizing.days_at_most:g}"
    return f"{sizing.nodes} nodes are the fewest: {days}; {_bound(recipe, sizing, batch)}"


def plan_summary_lines(
    problem: Problem,
    rows: list[PlanRow],
    result: SearchResult,
    sizing: ClusterSizing | None = None,
    batch: SmallerClusterBatch | None = None,
) -> list[str]:
    """Return what `plan` prints without --wide, at the terminal's width: the arguments are those
    of plan_text_lines."""
    head = [] if sizing is None else [_sizing_text(problem.recipe, sizing, batch), ""]
    if not result.ranked:
        return [*wrapped_lines(head), "no layout runs; --wide lists the rules that reject them"]
    return [
        *wrapped_lines(head),
        *summary_lines(
            problem,
            [row.estimate for row in rows if row.ranked],
            result,
            other_engine(problem, result.ranked[0]),
            rejected_faster_layouts(problem.recipe, result.ranked),
        ),
        *wrapped_rows(_expected_rows(problem, result.ranked[0])),
    ]


def plan_text_lines(
    problem: Problem,
    rows: list[PlanRow],
    result: SearchResult,
    sizing: ClusterSizing | None = None,
    batch: SmallerClusterBatch | None = None,
    larger: LargerBatch | None = None,
) -> list[str]:
    """Return what `plan --wide` prints, without line ends. rows: of plan_table_rows; batch: of
    smaller_cluster_batch; larger: of larger_batch."""
    recipe = problem.recipe
    is_cpu = recipe.cluster.gpu == "cpu"
    lines = [*table(rows, is_cpu=is_cpu), "", weights_summary(recipe.model.weights)] if rows else []
    if result.ranked:
        best, front = result.ranked[0], len(pareto_front(result.ranked))
        lines += [
            f"{len(result.ranked)} layouts run, {front} of them on the Pareto front of time and "
            f"memory; searched in {result.seconds:.2f} s",
            f"bound by {binding_constraint(best, result.fastest_over_memory(best))}",
            *error_notes([row.estimate for row in rows]),
        ]
        if (sums := low_precision_accumulation(problem)) is not None:
            lines.append(low_precision_accumulation_text(sums))
        if (kernels := chosen_kernels(problem)) is not None:
            lines.append(chosen_kernels_text(kernels))
        if (other := other_engine(problem, best)) is not None:
            lines.append(other_engine_text(other))
        lines += [
            f"faster but rejected: {rejected_faster_text(each)}"
            for each in rejected_faster_layouts(recipe, result.ranked)
        ]
        lines += labelled_lines(islands_rows(recipe, problem.graph, best), 9)
        lines += labelled_lines(_expected_rows(problem, best), 9)
    if sizing is not None:
        lines.append(_sizing_text(recipe, sizing, batch))
        lines += [] if larger is None else [larger_batch_text(larger)]
    slower = slower_regions(recipe, result.ranked, result.skipped)
    if slower:
        lines.append("slower than row 1:")
        lines += [
            f"  {slower_region_text(region):38} {slowdown_text(region):>9}  "
            f"{slowdown_reason(region)}"
            for region in slower[:MAX_SLOWER_REGIONS]
        ]
        if len(slower) > MAX_SLOWER_REGIONS:
            lines.append(f"  and {len(slower) - MAX_SLOWER_REGIONS} more (--json)")
    if result.skipped:
        least = result.skipped[0][0] / result.ranked[0].time.step_seconds - 1
        lines.append(f"{len(result.skipped)} layouts skipped: each at least {least:.1%} slower")
    if result.rejected:
        lines.append("ruled out:")
        lines += [
            f"  {region.count:6}  {region.code}  e.g. {region.reason}" for region in result.rejected
        ]
    return lines


def _pin_error(args: argparse.Namespace, rows: list[PlanRow]) -> str:
    """Return why --pin cannot write, or ""."""
    if args.pin > len(rows):
        return f"--pin {args.pin}: the table has {len(rows)} rows"
    if rows[args.pin - 1].broken:
        return f"--pin {args.pin}: that layout does not run ({rows[args.pin - 1].note})"
    if args.overrides:
        return (
            "--pin and --set: the pinned recipe would lack what --set changes; write it into "
            "the recipe first"
        )
    if args.recipe == "-" and args.output is None:
        return "--pin with a recipe from standard input needs -o FILE"
    target = _pinned_file(args)
    if target.exists() and str(target) != args.recipe:
        return f"--pin: {target} is there already; name another file with -o"
    return ""


def _pinned_file(args: argparse.Namespace) -> Path:
    """Return the recipe itself; for a model's name a new file that is called like the model."""
    if args.output is not None:
        return Path(args.output)
    return (
        Path(args.recipe)
        if recipe_writer.model_source(args) is None
        else Path(f"{Path(args.recipe).name}.yaml")
    )


def _pin(args: argparse.Namespace, recipe: Recipe, text: str, row: PlanRow) -> None:
    source = text or recipe.source.texts[recipe.source.file]
    target = _pinned_file(args)
    recipe_writer.write_pinned_recipe(source, target, row.estimate.strategy, recipe)
    print(
        f"row {args.pin} is pinned in {target}: {row.estimate.strategy.describe()}", file=sys.stderr
    )


# The table of `shardwright plan`.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Holds a row of the table. note: what sets it apart, such as a schedule, a broken rule, or a
    place outside the pins. ranked: it runs and is within the pins."""

    estimate: Estimate
    note: str
    broken: bool
    ranked: bool


DEGREES = "degrees"  # the table names the axes
HEADER = (
    *("#", DEGREES, "ZeRO", "micro x accum", "checkpointing", "peak / capacity GiB (headroom)"),
    *("s/step", "tokens/s/GPU", "MFU", "days", "cost", "Δ", ""),
)
TEXT_COLUMNS = ("checkpointing", "")  # the others are numbers, and stand on the right


def table(rows: Sequence[PlanRow], *, is_cpu: bool) -> list[str]:
    """Lines without a line end. Δ: step time against row 1."""
    axes = [
        axis
        for axis in AXES
        if axis.abbreviation
        and (
            axis.is_auto_by_default
            or any(row.estimate.strategy.values()[axis] != axis.off_value for row in rows)
        )
    ]
    cells = [
        _cells(place, row, rows[0].estimate, axes, is_cpu=is_cpu)
        for place, row in enumerate(rows, start=1)
    ]
    text = [i for i, name in enumerate(HEADER) if name in TEXT_COLUMNS]
    header = [name.replace("/GPU", f"/{rank_or_gpu(is_cpu=is_cpu)}") for name in HEADER]
    header[HEADER.index(DEGREES)] = " x ".join(axis.abbreviation for axis in axes)
    return table_lines(header, cells, text=text, bold=() if rows[0].broken else (0,))


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
        value_text(s.activation_checkpointing),
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
    """Return the share of a device that is left, or how often the peak would fill it."""
    times = memory.peak_bytes / memory.capacity_bytes
    return (
        f"({1 - times:.0%})"
        if memory.fits
        else f"does not fit ({times:.{1 if times >= 1.05 else 2}f}x)"
    )


def error_notes(estimates: Sequence[Estimate]) -> list[str]:
    """Return where the ± comes from, why rows have none, and what else makes them less sure."""
    notes = []
    known = [
        (e.error.step_time, e.error.step_time_regime)
        for e in estimates
        if e.error.step_time is not None
    ]
    if known:
        regimes = "; ".join(f"{share:.1%} ({regime})" for share, regime in dict.fromkeys(known))
        notes.append(f"± {regimes}: {error_source_text()}")
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
