"""`shardwright plan R`: search the layouts and rank them. `plan MODEL --gpu G --nodes N` does it
without a recipe."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli import model_recipe
from shardwright.cli.command_options import add_json, add_overrides, positive
from shardwright.cli.terminal import error, print_diagnostics, print_refusal
from shardwright.diagnostics import Refusal
from shardwright.layout.planning_problem import Problem
from shardwright.models.weights_location import weights_words
from shardwright.utils.strict_json import strict_json

if TYPE_CHECKING:
    from shardwright.cli.plan_table import PlanRow
    from shardwright.layout.layout import Strategy
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.search.cluster_sizing import LargerBatch, OtherBatch, Sizing
    from shardwright.search.layout_comparison import LostRegion
    from shardwright.search.layout_search import SearchResult
    from shardwright.utils.json_types import JsonObject, JsonValue

MOST_LOST = 5  # regions that the page names; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE|MODEL",
        help="a recipe file; or a hub id or model folder, with --gpu and --nodes",
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
    add_json(parser)
    model = parser.add_argument_group("for a MODEL instead of a recipe")
    model.add_argument(
        "--gpu", metavar="NAME", help="a GPU from the catalogue, such as h100-sxm-80gb"
    )
    model.add_argument("--nodes", type=positive, metavar="N", help="number of nodes")
    model.add_argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        help=f"GPUs on each node (default {model_recipe.GPUS_PER_NODE})",
    )
    model.add_argument(
        "--sequence-length",
        type=positive,
        metavar="S",
        help=(
            "tokens per sequence (default: the model's longest, at most "
            f"{model_recipe.LONGEST_ASSUMED_SEQUENCE})"
        ),
    )
    model.add_argument(
        "--global-batch-size",
        type=positive,
        metavar="B",
        help="sequences per step (default: about 4 M tokens, a multiple of the number of GPUs)",
    )
    model.add_argument(
        "--precision", metavar="P", help=f"bf16, fp16 or fp32 (default {model_recipe.PRECISION})"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 1 where no layout is feasible; the rejected regions are printed all the same."""
    from shardwright.cli.measurement_text import plan_lines
    from shardwright.compile import size_recipe
    from shardwright.recipe.recipe_loader import load_recipe
    from shardwright.search.cluster_sizing import larger_batch, other_batch
    from shardwright.search.layout_search import choose, search

    model = model_recipe.model_of(args)
    wrong = model_recipe.usage_error(args, model)
    if wrong:
        error(wrong)
        return 1
    text = ""
    if model is None:
        recipe = load_recipe(Path(args.recipe), args.overrides)
    else:
        text = model_recipe.recipe_text(args, model)
        recipe = model_recipe.load_text(text, args.overrides, model_recipe.words_of(args, model))
    problem, sizing = size_recipe(recipe, compares_engines=True)
    recipe = problem.recipe
    batch = None if sizing is None else other_batch(problem, sizing)
    larger = None if sizing is None else larger_batch(problem, sizing)
    result = search(problem)
    rows = ranked_rows(problem, result, args.top)
    if args.pin is not None and (wrong := _unpinnable(args, rows)):
        error(wrong)
        return 1
    if args.json:
        found = _object(args.recipe, problem, rows, result, sizing, batch, larger)
        if model is not None:
            found["planned_as"], found["assumed"] = (
                model_recipe.planned_as(recipe),
                list(model_recipe.assumed_keys(args)),
            )
        print(strict_json({**found, **_measured(problem)}))
    else:
        lines = [
            *model_recipe.heading(args, text),
            *page_lines(problem, rows, result, sizing, batch, larger),
        ]
        print("\n".join([*lines, *plan_lines(recipe, problem.graph, problem.cluster)]), flush=True)
        print_diagnostics(result.ranked[0].diagnostics if result.ranked else (), recipe.source)
    if args.pin is not None:
        _pin(args, recipe, text, rows[args.pin - 1])
    if result.ranked:
        return 0
    try:
        choose(problem)
    except Refusal as refusal:
        print_refusal(refusal, recipe.source)
    return 1


def _measured(problem: Problem) -> JsonObject:
    """Where the recipe names a file."""
    from shardwright.cli.measurement_text import measured_object

    found = measured_object(problem.recipe, problem.graph, None)
    return {} if found is None else {"measured": found}


def ranked_rows(problem: Problem, result: SearchResult, top: int) -> list[PlanRow]:
    """The best, and "what you would run today" (pipeline 1, tensor 1, ZeRO-2 and 3): within the
    ranking where the pins allow it, below it otherwise."""
    from shardwright.search.layout_search import baselines
    from shardwright.search.rejected_faster_layouts import set_aside

    today = baselines(problem)
    place = {estimate.strategy: i for i, estimate in enumerate(result.ranked)}
    chosen = {e.strategy: e for e in result.ranked[:top]}
    chosen |= {e.strategy: e for e in today if e.strategy in place}
    aside = {each.strategy for each in set_aside(problem.recipe, result.ranked)}
    chosen |= {e.strategy: e for e in result.ranked if e.strategy in aside}
    shown = sorted(chosen.values(), key=lambda e: place[e.strategy])
    of_today = {e.strategy for e in today}
    return [
        *(
            _row(problem, e, today=e.strategy in of_today, ranked=True, aside=e.strategy in aside)
            for e in shown
        ),
        *(
            _row(problem, e, today=True, ranked=False, aside=False)
            for e in today
            if e.strategy not in place
        ),
    ]


def _row(
    problem: Problem, estimate: Estimate, *, today: bool, ranked: bool, aside: bool
) -> PlanRow:
    from shardwright.cli.measurement_text import run_note
    from shardwright.cli.plan_table import PlanRow

    s = estimate.strategy
    notes = [axis.note.format(value) for axis, value in s.beyond_plain() if axis.note]
    notes += [f"today's ZeRO-{s.zero_stage}"] if today else []
    notes += ["set aside"] if aside else []
    notes += [ran] if (ran := run_note(problem.recipe, problem.graph, s)) else []
    broken = [d.code for d in estimate.diagnostics if d.severity == "error"]
    notes += broken or ([] if ranked or _is_within_pins(problem.recipe, s) else ["not as pinned"])
    return PlanRow(estimate=estimate, note=", ".join(notes), broken=bool(broken))


def _is_within_pins(recipe: Recipe, s: Strategy) -> bool:
    from shardwright.layout.layout import free_axes

    return all(axis.pin(recipe) in (None, getattr(s, axis.name)) for axis in free_axes())


def _object(
    path: str,
    problem: Problem,
    rows: list[PlanRow],
    result: SearchResult,
    sizing: Sizing | None,
    batch: OtherBatch | None,
    larger: LargerBatch | None,
) -> dict[str, JsonValue]:
    from shardwright.cli.estimate_command import estimate_object
    from shardwright.search.accumulation_dtype_choice import short_sums
    from shardwright.search.engine_choice import other_engine
    from shardwright.search.kernel_choice import chosen_kernels
    from shardwright.search.layout_comparison import binding_constraint, lost_regions, pareto_front
    from shardwright.search.rejected_faster_layouts import set_aside

    recipe, sums, kernels = problem.recipe, short_sums(problem), chosen_kernels(problem)
    best = result.ranked[0] if result.ranked else None
    other = None if best is None else other_engine(problem, best)
    found: dict[str, JsonValue] = {
        "recipe": path,
        "plans": [estimate_object(path, row.estimate) for row in rows],
        "rejected": [dataclasses.asdict(region) for region in result.rejected],
        "not_priced": [
            {"least_seconds": least, **dataclasses.asdict(s)} for least, s in result.slow
        ],
        "lost": [
            _lost_object(region) for region in lost_regions(recipe, result.ranked, result.slow)
        ],
        "pareto": [estimate_object(path, estimate) for estimate in pareto_front(result.ranked)],
        "binding": None if best is None else binding_constraint(best, result.beyond_memory(best)),
        "measured_error": _measured_error(result),
        "set_aside": [dataclasses.asdict(each) for each in set_aside(recipe, result.ranked)],
        "short_sums": None if sums is None else dataclasses.asdict(sums),
        "kernels": None if kernels is None else dataclasses.asdict(kernels),
        "target": recipe.target,
        "other_engine": None if other is None else dataclasses.asdict(other),
        "search_seconds": result.seconds,
    }
    if sizing is not None:
        nearby = None if batch is None else dataclasses.asdict(batch)
        more = None if larger is None else dataclasses.asdict(larger)
        bound: JsonObject = {
            "bound": _bound(recipe, sizing, batch),
            "other_batch": nearby,
            "larger_batch": more,
        }
        found["sizing"] = {**dataclasses.asdict(sizing), **bound}
    return found


def _lost_object(region: LostRegion) -> JsonObject:
    fields = dataclasses.asdict(region)
    del fields["where"]
    return {**dict(region.where), **fields}


def _measured_error(result: SearchResult) -> dict[str, JsonValue]:
    """Of the best plan; each plan has its own."""
    from shardwright.cost.prediction_errors import bench

    best = result.ranked[0].error if result.ranked else None
    return {
        "step_time": None if best is None else best.step_time,
        "memory": None if best is None else best.memory,
        "runs": bench().time.runs,
        "projects": bench().projects,
    }


def _bound(recipe: Recipe, sizing: Sizing, batch: OtherBatch | None) -> str:
    return (
        sizing.bound()
        if batch is None
        else batch.words(recipe.training.global_batch_size, sizing.nodes)
    )


def page_lines(
    problem: Problem,
    rows: list[PlanRow],
    result: SearchResult,
    sizing: Sizing | None = None,
    batch: OtherBatch | None = None,
    larger: LargerBatch | None = None,
) -> list[str]:
    """What `plan` prints, without a line end. rows: of ranked_rows; batch: of other_batch; larger:
    of larger_batch."""
    from shardwright.cli.estimate_command import islands_rows
    from shardwright.cli.plan_table import error_notes, table
    from shardwright.search.accumulation_dtype_choice import short_sums
    from shardwright.search.engine_choice import other_engine
    from shardwright.search.kernel_choice import chosen_kernels
    from shardwright.search.layout_comparison import binding_constraint, lost_regions, pareto_front
    from shardwright.search.rejected_faster_layouts import set_aside, set_aside_words

    recipe = problem.recipe
    is_cpu = recipe.cluster.gpu == "cpu"
    lines = [*table(rows, is_cpu=is_cpu), "", weights_words(recipe.model.weights)] if rows else []
    if result.ranked:
        best, front = result.ranked[0], len(pareto_front(result.ranked))
        lines += [
            f"{len(result.ranked)} layouts run, {front} of them on the Pareto front of time and "
            f"memory; searched in {result.seconds:.2f} s",
            f"bound by {binding_constraint(best, result.beyond_memory(best))}",
            *error_notes([row.estimate for row in rows]),
        ]
        sums = short_sums(problem)
        lines += [] if sums is None else [sums.words()]
        kernels = chosen_kernels(problem)
        lines += [] if kernels is None else [kernels.words()]
        other = other_engine(problem, best)
        lines += [] if other is None else [other.words()]
        lines += [
            f"set aside: {set_aside_words(each)}" for each in set_aside(recipe, result.ranked)
        ]
        told = islands_rows(recipe, problem.graph, best)
        lines += [f"{name or ' ' * 7}  {words}" for name, words in told]
    if sizing is not None:
        days = f"{sizing.days:.3g} days of at most {sizing.days_at_most:g}"
        lines.append(
            f"{sizing.nodes} nodes are the fewest: {days}; {_bound(recipe, sizing, batch)}"
        )
        lines += [] if larger is None else [larger.words()]
    lost = lost_regions(recipe, result.ranked, result.slow)
    if lost:
        lines.append("lost to row 1:")
        lines += [
            f"  {region.words():38} {region.slower_words():>9}  {region.because}"
            for region in lost[:MOST_LOST]
        ]
        lines += [f"  and {len(lost) - MOST_LOST} more (--json)"] if len(lost) > MOST_LOST else []
    if result.slow:
        least = result.slow[0][0] / result.ranked[0].time.step_seconds - 1
        lines.append(
            f"not priced: {len(result.slow)} layouts that are slower by {least:.1%} at least"
        )
    if result.rejected:
        lines.append("ruled out:")
        lines += [
            f"  {region.count:6}  {region.code}  e.g. {region.reason}" for region in result.rejected
        ]
    return lines


def _unpinnable(args: argparse.Namespace, rows: list[PlanRow]) -> str:
    """Why --pin cannot write, or ""."""
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
    """The recipe itself; for a model's name a new file, called as the model."""
    if args.output is not None:
        return Path(args.output)
    return (
        Path(args.recipe)
        if model_recipe.model_of(args) is None
        else Path(f"{Path(args.recipe).name}.yaml")
    )


def _pin(args: argparse.Namespace, recipe: Recipe, text: str, row: PlanRow) -> None:
    from shardwright.cli.recipe_pins import pin_recipe

    source = text or recipe.source.texts[recipe.source.file]
    target = _pinned_file(args)
    pin_recipe(source, target, row.estimate.strategy, recipe)
    print(
        f"row {args.pin} is pinned in {target}: {row.estimate.strategy.describe()}", file=sys.stderr
    )
