"""Which figures of a plan were measured: lines for `plan` and `estimate`, a table for `explain`,
--json's object."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from shardwright.cli.terminal_tables import table_lines, title
from shardwright.cost.calibrated_costs import calibration_for, measured_run_of, ranks_per_core
from shardwright.cost.cost_constants import constant_entries
from shardwright.utils.number_format import format_number

if TYPE_CHECKING:
    from shardwright.cluster.cluster_types import Cluster
    from shardwright.layout.layout import Layout
    from shardwright.models.model_graph import ModelGraph
    from shardwright.recipe.measurements import MeasuredValue, Measurements
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.utils.json_types import JsonObject

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
