"""`shardwright estimate R...`: what the pinned layout costs. One JSON object a recipe with --json,
else a page.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import (
    labelled_lines,
    print_diagnostics,
    print_refusal,
    table_lines,
    title,
)
from shardwright.cost.calibrated_costs import calibration_for, measured_run_of, ranks_per_core
from shardwright.cost.cost_constants import constant_entries
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.recipe.recipe_types import AssumeSection
from shardwright.utils.json_values import JsonDocument, strict_json
from shardwright.utils.number_format import (
    GIB,
    format_days,
    format_device_hours,
    format_number,
    format_token_rate,
    rank_or_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.cost.diloco_costs import IslandsCost
    from shardwright.cost.goodput import Goodput
    from shardwright.layout.gpu_cluster import Cluster
    from shardwright.layout.layout import Layout
    from shardwright.layout.layout_estimate import Estimate, Training
    from shardwright.layout.planning_problem import Problem
    from shardwright.models.model_graph import ModelGraph
    from shardwright.recipe.measurements import MeasuredValue, Measurements
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.search.recovery_goodput import RecoveryGoodput


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
    """Print what one recipe's layout costs, and return whether it is feasible."""
    from shardwright.compile.recipe_compiler import estimate_recipe
    from shardwright.cost.goodput import goodput
    from shardwright.cost.scoring_cost import scoring_cost
    from shardwright.recipe.recipe_loader import load_recipe
    from shardwright.search.recovery_goodput import recovery_goodput

    try:
        problem, estimate = estimate_recipe(load_recipe(Path(path), overrides))
    except Refusal as refusal:
        if as_json:  # no "memory" and no "time": there was nothing to count
            print_infeasible_json(path, refusal)
        else:
            print_refusal(refusal)
        return False
    recipe, graph, expected = problem.recipe, problem.graph, goodput(problem, estimate)
    recovery = recovery_goodput(problem, estimate, expected)
    if as_json:
        document = {
            **estimate_json(path, estimate),
            "cluster": cluster_json(problem.cluster),
            "goodput": expected,
            "recovery": recovery,
            "scoring": scoring_cost(problem, estimate),
            "assume": recipe.assume,
            **measurements_json(recipe, graph, estimate.strategy),
            **islands_json(recipe, graph, estimate),
        }
        print(strict_json(document), flush=True)
    else:
        rows = [
            *estimate_rows(estimate, recipe, expected),
            *recovery_rows(recovery),
            *scoring_rows(problem, estimate),
            *islands_rows(recipe, graph, estimate),
        ]
        notes = measurement_note_lines(recipe, graph, problem.cluster)
        lines = [path, *labelled_lines(rows, 9, "  "), *(f"  {line}" for line in notes), ""]
        print("\n".join(lines), flush=True)
        print_diagnostics(estimate.diagnostics, recipe.source)
    return estimate.feasible


def print_infeasible_json(path: str, refusal: Refusal) -> None:
    """Print the object of a recipe whose layout cannot be estimated."""
    found = diagnostics_json(refusal.diagnostics)
    print(strict_json({"recipe": path, "feasible": False, "diagnostics": found}), flush=True)


def estimate_json(path: str, estimate: Estimate) -> JsonDocument:
    """Return the object of each plan of `plan --json`; `estimate --json` adds the goodput and what
    the recipe assumes."""
    from shardwright.cost.prediction_errors import error_json_fields

    error_fields = error_json_fields(estimate.error)
    return {
        "recipe": path,
        "feasible": estimate.feasible,
        "diagnostics": diagnostics_json(estimate.diagnostics),
        **{part: asdict(getattr(estimate, part)) | error_fields.get(part, {}) for part in _PARTS},
        "flops_source": estimate.flops_source,
    }


def goodput_rows(expected: Goodput | None) -> list[tuple[str, str]]:
    """Return (name, text) rows, the name on the first alone."""
    from shardwright.report.plan_sentences import goodput_lines

    lines = [] if expected is None else goodput_lines(expected)
    return [("" if line else "goodput", text) for line, text in enumerate(lines)]


def recovery_rows(found: RecoveryGoodput | None) -> list[tuple[str, str]]:
    """Return (name, text) rows, the name on the first alone."""
    from shardwright.report.plan_sentences import recovery_lines

    lines = [] if found is None else recovery_lines(found)
    return [("" if line else "recovery", text) for line, text in enumerate(lines)]


def scoring_rows(problem: Problem, estimate: Estimate) -> list[tuple[str, str]]:
    """Return (name, text) rows of what is scored before the first step, the name on the first
    alone."""
    from shardwright.cost.scoring_cost import scoring_cost
    from shardwright.report.plan_sentences import scoring_lines

    lines = scoring_lines(problem.recipe.training, scoring_cost(problem, estimate))
    return [("" if line else "scoring", text) for line, text in enumerate(lines)]


def islands_cost_of(recipe: Recipe, graph: ModelGraph, estimate: Estimate) -> IslandsCost | None:
    """Return what the islands' outer steps cost beside the layout's own; None without islands."""
    from shardwright.cost.diloco_costs import inner_step_seconds, islands_cost

    return islands_cost(recipe, graph.total_parameters, inner_step_seconds(estimate.time))


def islands_json(recipe: Recipe, graph: ModelGraph, estimate: Estimate) -> JsonDocument:
    """Return {"islands": their cost}; {} without islands."""
    cost = islands_cost_of(recipe, graph, estimate)
    return {} if cost is None else {"islands": cost}


def islands_rows(recipe: Recipe, graph: ModelGraph, estimate: Estimate) -> list[tuple[str, str]]:
    """Return (name, text) rows, the name on the first alone; none without islands."""
    from shardwright.report.plan_sentences import islands_cost_lines

    cost = islands_cost_of(recipe, graph, estimate)
    lines = [] if cost is None else islands_cost_lines(cost)
    return [("" if line else "islands", text) for line, text in enumerate(lines)]


def cluster_text(recipe: Recipe, cluster: Cluster) -> str:
    """Return the nodes and GPUs, and the NVLink domain where no node is one. cluster: of one
    island."""
    islands, domain = recipe.cluster.islands, cluster.nvlink_domain_gpus
    one = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    whole = one if islands == 1 else f"{islands} islands of {one} each"
    return whole if domain == cluster.gpus_per_node else f"{whole}, NVLink domains of {domain} GPUs"


def cluster_json(cluster: Cluster) -> JsonDocument:
    """Return the cluster of `--json`. cluster: of one island."""
    return {
        **{key: getattr(cluster, key) for key in ("nodes", "gpus_per_node", "nvlink_domain_gpus")},
        "gpu": cluster.gpu.name,
    }


def diagnostics_json(diagnostics: Sequence[Diagnostic]) -> list[JsonDocument]:
    keys = ("code", "severity", "message", "help")
    return [{**{key: getattr(d, key) for key in keys}, "valid": list(d.valid)} for d in diagnostics]


def training_length_text(recipe: Recipe, training: Training) -> str:
    """Return the steps, the time, the GPU hours and the cost."""
    if not training.steps:
        return f"{recipe.training.epochs:g} epochs: the steps are known once the data is prepared"
    cost = "" if training.cost is None else f", cost {training.cost:,.0f}"
    hours = format_device_hours(training.gpu_hours, is_cpu=recipe.cluster.gpu == "cpu")
    return f"{training.steps:,} steps, {format_days(training.days)}, {hours}{cost}"


def estimate_rows(
    estimate: Estimate, recipe: Recipe, expected: Goodput | None
) -> list[tuple[str, str]]:
    """Return (name, text) rows of a layout's memory, time and training."""
    from shardwright.layout.layout import in_layer_axes
    from shardwright.report.plan_sentences import error_bar_text, flops_source_text, hpz_text

    s, time, memory, assume = estimate.strategy, estimate.time, estimate.memory, recipe.assume
    is_cpu = recipe.cluster.gpu == "cpu"
    hpz, flops = hpz_text(s), flops_source_text(estimate.flops_source)
    outer = f"outer {time.outer_comm_seconds:.4g} s, " if time.outer_comm_seconds else ""
    micro_batch = f"micro_batch_size={s.micro_batch_size}"
    layout = s.describe().replace(
        micro_batch, f"{micro_batch} accumulation={s.gradient_accumulation_steps}"
    )
    rows = [
        ("layout", layout),
        ("weights", hpz),
        (
            "memory",
            f"{memory.peak_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB, "
            f"{'fits' if memory.fits else 'does not fit'}",
        ),
        (
            "step",
            f"{time.step_seconds:.4g} s, "
            f"{format_token_rate(time.tokens_per_second_per_gpu, is_cpu=is_cpu)}, "
            f"{time.model_tflops_per_gpu:.4g} TFLOP/s per {rank_or_gpu(is_cpu=is_cpu)}, "
            f"MFU {time.mfu:.1%}",
        ),
        (
            "of it",
            f"compute {time.compute_seconds:.4g} s, {'+'.join(in_layer_axes(s))} "
            f"{time.tensor_comm_seconds:.4g} s, pipeline {time.pipeline_comm_seconds:.4g} s, "
            f"data {time.data_comm_seconds:.4g} s, optimizer {time.optimizer_seconds:.4g} s, "
            f"{outer}bubble {time.bubble_seconds:.4g} s ({time.bubble_fraction:.1%} idle)",
        ),
        ("error", error_bar_text(estimate.error)),
        ("FLOPs", flops),
        ("training", training_length_text(recipe, estimate.training)),
        *goodput_rows(expected),
    ]
    if assume != AssumeSection(kernels="auto", mfu=None, ignore_memory=False):
        rows.append(("assumed", " ".join(f"{k}={value}" for k, value in asdict(assume).items())))
    return [(name, text) for name, text in rows if text]


# Which figures of a plan were measured: lines for `plan` and `estimate`, a table for `explain`,
# --json's object.


NOISY = 0.25
"""A spread from which on a machine was not quiet."""


def measurement_lines(found: Measurements) -> list[str]:
    """List each measured constant beside the one that it replaces, and count the other figures."""
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
    """Return a section of `explain`; [] where the recipe names no file."""
    measured = recipe.cluster.measured
    if measured is None:
        return []
    return [*measurement_lines(measured.found), *shared_cores_lines(recipe, cluster)]


def measurements_json(recipe: Recipe, graph: ModelGraph, strategy: Layout | None) -> JsonDocument:
    """Return {"measured": the figures of the recipe's file}; {} where it names none. strategy: the
    layout whose own run is wanted."""
    measured = recipe.cluster.measured
    if measured is None:
        return {}
    found, whole = measured.found, calibration_for(recipe, graph)
    run = None if strategy is None else measured_run_of(recipe, graph, strategy)
    return {
        "measured": {
            "file": measured.path,
            "sha256": measured.sha256,
            "machine": found.machine,
            "constants": found.constants,
            "layers": whole.layers if whole else (),
            "engine": whole.engine if whole else (),
            "run": run,
        }
    }


def measured_run_note(recipe: Recipe, graph: ModelGraph, strategy: Layout) -> str:
    """Return the step time of a row whose layout was run; "" elsewhere."""
    run = measured_run_of(recipe, graph, strategy)
    return "" if run is None else f"ran: {format_number(run.step_seconds.value)} s"
