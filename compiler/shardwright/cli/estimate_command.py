"""`shardwright estimate R...`: what the pinned layout costs. One JSON object a recipe with --json,
else a page.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import print_diagnostics, print_refusal, table_lines, title
from shardwright.cost.calibrated_costs import calibration_for, measured_run_of, ranks_per_core
from shardwright.cost.cost_constants import constant_entries
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.recipe.recipe_types import AssumeSection
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import (
    format_days,
    format_device_hours,
    format_number,
    format_token_rate,
    rank_or_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.cluster.gpu_catalogue import Cluster
    from shardwright.cost.goodput import Goodput
    from shardwright.layout.layout import Layout
    from shardwright.layout.layout_estimate import Estimate, Training
    from shardwright.models.model_graph import ModelGraph
    from shardwright.recipe.measurements import MeasuredValue, Measurements
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.utils.json_values import JsonObject, JsonValue


_PARTS = ("strategy", "memory", "time", "training", "error")


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe files")
    add_overrides(parser)
    add_json(parser, "print one JSON object per recipe, one per line, in order")


def run_estimate(args: argparse.Namespace) -> int:
    """Exit 1 if any recipe is infeasible, after all of them."""
    feasible = [_estimate(path, args.overrides, as_json=args.json) for path in args.recipes]
    return 0 if all(feasible) else 1


def _estimate(path: str, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Prints what there is to say of one recipe; whether it is feasible."""
    from shardwright.compile import estimate_recipe
    from shardwright.cost.goodput import goodput
    from shardwright.recipe.recipe_loader import load_recipe

    try:
        problem, estimate = estimate_recipe(load_recipe(Path(path), overrides))
    except Refusal as refusal:
        if as_json:  # no "memory" and no "time": there was nothing to count
            found = diagnostics_json(refusal.diagnostics)
            print(
                strict_json({"recipe": path, "feasible": False, "diagnostics": found}), flush=True
            )
        else:
            print_refusal(refusal)
        return False
    recipe, expected = problem.recipe, goodput(problem, estimate)
    if as_json:
        measured = measurements_json(recipe, problem.graph, estimate.strategy)
        more = {"goodput": goodput_json(expected), "assume": dataclasses.asdict(recipe.assume)}
        more |= {} if measured is None else {"measured": measured}
        more |= islands_json(recipe, problem.graph, estimate)
        print(strict_json({**estimate_json(path, estimate), **more}), flush=True)
    else:
        rows = islands_rows(recipe, problem.graph, estimate)
        told = [f"  {name:<8} {words}" for name, words in rows]
        told += [
            f"  {line}" for line in measurement_note_lines(recipe, problem.graph, problem.cluster)
        ]
        print("\n".join([path, *_lines(estimate, recipe, expected), *told, ""]), flush=True)
        print_diagnostics(estimate.diagnostics, recipe.source)
    return estimate.feasible


def estimate_json(path: str, estimate: Estimate) -> dict[str, JsonValue]:
    """The object of each plan of `plan --json`; `estimate --json` adds the goodput and what the
    recipe assumes."""
    from shardwright.cost.prediction_errors import error_json_fields

    told = error_json_fields(estimate.error)
    return {
        "recipe": path,
        "feasible": estimate.feasible,
        "diagnostics": diagnostics_json(estimate.diagnostics),
        **{
            part: dataclasses.asdict(getattr(estimate, part)) | told.get(part, {})
            for part in _PARTS
        },
        "flops_source": estimate.flops_source,
    }


def goodput_json(expected: Goodput | None) -> JsonValue:
    """null where nothing says how much is trained between saves."""
    return None if expected is None else dataclasses.asdict(expected)


def goodput_rows(expected: Goodput | None) -> list[tuple[str, str]]:
    """(name, words), the name on the first alone."""
    from shardwright.report.plan_sentences import goodput_lines

    words = [] if expected is None else goodput_lines(expected)
    return [("" if line else "goodput", text) for line, text in enumerate(words)]


def islands_json(recipe: Recipe, graph: ModelGraph, estimate: Estimate) -> dict[str, JsonValue]:
    """{} without islands."""
    from shardwright.cost.diloco_costs import inner_step_seconds, islands_cost

    found = islands_cost(recipe, graph.total_parameters, inner_step_seconds(estimate.time))
    return {} if found is None else {"islands": dataclasses.asdict(found)}


def islands_rows(recipe: Recipe, graph: ModelGraph, estimate: Estimate) -> list[tuple[str, str]]:
    """(name, words), the name on the first alone."""
    from shardwright.cost.diloco_costs import inner_step_seconds, islands_cost
    from shardwright.report.plan_sentences import islands_cost_lines

    found = islands_cost(recipe, graph.total_parameters, inner_step_seconds(estimate.time))
    words = [] if found is None else islands_cost_lines(found)
    return [("" if line else "islands", text) for line, text in enumerate(words)]


def cluster_text(recipe: Recipe, cluster: Cluster) -> str:
    """cluster: of one island."""
    islands = recipe.cluster.islands
    one = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    return one if islands == 1 else f"{islands} islands of {one} each"


def diagnostics_json(diagnostics: Sequence[Diagnostic]) -> list[JsonValue]:
    return [
        {
            "code": d.code,
            "severity": d.severity,
            "message": d.message,
            "help": d.help,
            "valid": list(d.valid),
        }
        for d in diagnostics
    ]


def training_length_text(recipe: Recipe, training: Training) -> str:
    """Steps, time, GPU hours and cost."""
    if not training.steps:
        return f"{recipe.training.epochs:g} epochs: the steps are known once the data is prepared"
    cost = "" if training.cost is None else f", cost {training.cost:,.0f}"
    hours = format_device_hours(training.gpu_hours, is_cpu=recipe.cluster.gpu == "cpu")
    return f"{training.steps:,} steps, {format_days(training.days)}, {hours}{cost}"


def _lines(estimate: Estimate, recipe: Recipe, expected: Goodput | None) -> list[str]:
    from shardwright.layout.layout import in_layer_axes
    from shardwright.report.plan_sentences import error_bar_text, flops_source_text, hpz_text

    s, time, memory, assume = estimate.strategy, estimate.time, estimate.memory, recipe.assume
    is_cpu = recipe.cluster.gpu == "cpu"
    gib = 2**30
    hpz, flops, inside = (
        hpz_text(s),
        flops_source_text(estimate.flops_source),
        "+".join(in_layer_axes(s)),
    )
    outer = f"outer {time.outer_comm_seconds:.4g} s, " if time.outer_comm_seconds else ""
    micro_batch = f"micro_batch_size={s.micro_batch_size}"
    layout = s.describe().replace(
        micro_batch, f"{micro_batch} accumulation={s.gradient_accumulation_steps}"
    )
    lines = [
        f"  layout   {layout}",
        *([f"  weights  {hpz}"] if hpz else []),
        f"  memory   {memory.peak_bytes / gib:.1f} of {memory.capacity_bytes / gib:.1f} GiB, "
        f"{'fits' if memory.fits else 'does not fit'}",
        f"  step     {time.step_seconds:.4g} s, "
        f"{format_token_rate(time.tokens_per_second_per_gpu, is_cpu=is_cpu)}, "
        f"{time.model_tflops_per_gpu:.4g} "
        f"TFLOP/s per {rank_or_gpu(is_cpu=is_cpu)}, MFU {time.mfu:.1%}",
        f"  of it    compute {time.compute_seconds:.4g} s, {inside} {time.tensor_comm_seconds:.4g} "
        f"s, pipeline {time.pipeline_comm_seconds:.4g} s, data {time.data_comm_seconds:.4g} s, "
        f"optimizer {time.optimizer_seconds:.4g} s, {outer}bubble {time.bubble_seconds:.4g} s "
        f"({time.bubble_fraction:.1%} idle)",
        f"  error    {error_bar_text(estimate.error)}",
        *([f"  FLOPs    {flops}"] if flops else []),
        f"  training {training_length_text(recipe, estimate.training)}",
        *(f"  {name:<8} {words}" for name, words in goodput_rows(expected)),
    ]
    if assume != AssumeSection(kernels="auto", mfu=None, ignore_memory=False):
        given = (f"{name}={value}" for name, value in dataclasses.asdict(assume).items())
        lines.append(f"  assumed  {' '.join(given)}")
    return lines


# Which figures of a plan were measured: lines for `plan` and `estimate`, a table for `explain`,
# --json's object.


NOISY = 0.25
"""A spread from which on a machine was not quiet."""


def measurement_lines(found: Measurements) -> list[str]:
    """Every constant beside the one that it replaces, and how many of the other figures there
    are."""
    entries = constant_entries()
    rows = [
        (
            name,
            f"{f.value:.4g}",
            f"{entries[name]['value']:.4g}",
            entries[name]["unit"],
            str(f.n),
            f"{f.spread:.0%}",
        )
        for name, f in found.constants.items()
        if name in entries
    ]
    machine = found.machine
    lines = [
        title(
            f"Measured on {machine.device}, {machine.cores} cores, with {machine.ranks} ranks, "
            f"{machine.precision}"
        ),
        *(
            table_lines(
                ("constant", "measured", "instead of", "unit", "n", "spread"), rows, text=(0, 3)
            )
            if rows
            else []
        ),
    ]
    lines += [
        f"{words}: {measurement_spread_text(figures)}"
        for words, figures in _groups(found)
        if figures
    ]
    return lines


def _groups(found: Measurements) -> list[tuple[str, list[MeasuredValue]]]:
    layers = [
        figure for row in found.layers for figure in (row.forward_seconds, row.backward_seconds)
    ]
    engine = [
        figure for row in found.engine for figure in (row.micro_batch_seconds, row.step_seconds)
    ]
    return [
        ("layers of the model, forward and backward", layers),
        ("the engine's own time", engine),
        ("whole runs", [run.step_seconds for run in found.runs]),
    ]


def measurement_spread_text(figures: list[MeasuredValue]) -> str:
    spread = median(figure.spread for figure in figures)
    noisy = ": the machine had other work, measure again" if spread > NOISY else ""
    repeats = [figure.n for figure in figures]
    return f"{len(figures)} figures, n {min(repeats)} to {max(repeats)}, spread {spread:.0%}{noisy}"


def measurement_note_lines(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> list[str]:
    """Below the table of `plan`, and in `estimate`; none where the recipe names no file."""
    measured = recipe.cluster.measured
    if measured is None:
        return []
    found, whole = measured.found, calibration_for(recipe, graph)
    constants = list(found.constants.values())
    named = ", ".join(found.constants)
    lines = (
        [f"measured on {found.machine.device}: {named} ({measurement_spread_text(constants)})"]
        if constants
        else []
    )
    if whole is not None:
        lines += [
            f"measured: {words} ({measurement_spread_text(figures)})"
            for words, figures in _groups(whole)
            if figures
        ]
    elif found.layers or found.runs:
        lines.append(
            "its layers and runs are of another model, sequence length or engine: not used"
        )
    return [*lines, *shared_cores_lines(recipe, cluster)]


def shared_cores_lines(recipe: Recipe, cluster: Cluster) -> list[str]:
    measured = recipe.cluster.measured
    if measured is None or ranks_per_core(recipe, cluster) == 1:
        return []
    cores = measured.found.machine.cores
    return [
        f"{cluster.gpus_per_node} ranks share {cores} core{'' if cores == 1 else 's'}: a "
        "pipeline's idle time is not idle, so that the order of the layouts is surer than their "
        "steps"
    ]


def measurement_section_lines(recipe: Recipe, cluster: Cluster) -> list[str]:
    """A section of `explain`; none where the recipe names no file."""
    measured = recipe.cluster.measured
    if measured is None:
        return []
    return [*measurement_lines(measured.found), *shared_cores_lines(recipe, cluster)]


def measurements_json(
    recipe: Recipe, graph: ModelGraph, strategy: Layout | None
) -> JsonObject | None:
    """For --json. run: of this very layout."""
    measured = recipe.cluster.measured
    if measured is None:
        return None
    found, whole = measured.found, calibration_for(recipe, graph)
    run = None if strategy is None else measured_run_of(recipe, graph, strategy)
    return {
        "file": measured.path,
        "sha256": measured.sha256,
        "machine": asdict(found.machine),
        "constants": {name: asdict(figure) for name, figure in found.constants.items()},
        "layers": [asdict(row) for row in whole.layers] if whole else [],
        "engine": [asdict(row) for row in whole.engine] if whole else [],
        "run": None if run is None else asdict(run),
    }


def measured_run_note(recipe: Recipe, graph: ModelGraph, strategy: Layout) -> str:
    """Of a row of the table whose layout ran."""
    run = measured_run_of(recipe, graph, strategy)
    return "" if run is None else f"ran: {format_number(run.step_seconds.value)} s"
