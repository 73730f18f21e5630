"""`shardwright compile R -o DIR`: a recipe becomes a folder that `run` trains from."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import print_diagnostics, shell_quoted
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.models.model_files import weights_summary
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import SECONDS_PER_DAY, format_days, format_number

if TYPE_CHECKING:
    from shardwright.compile import CompileResult
    from shardwright.monitor.run_files import SaveStatistics
    from shardwright.plan.plan import Plan, PlanStage, PlanTraining
    from shardwright.recipe.recipe_types import Recipe

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="the recipe file")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write"
    )
    add_overrides(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shardwright.compiled_folder import (
        check_output_folder,
        remove_surplus_island_plans,
        write_folder,
    )
    from shardwright.plan.island_plans import island_name
    from shardwright.recipe.recipe_loader import load_recipe, with_measured_checkpoint_rate

    recipe = load_recipe(args.recipe, args.overrides)
    # Before the seconds that torch needs.
    islands = range(recipe.cluster.islands if recipe.training.outer else 0)
    for folder in (args.output, *(args.output / island_name(k) for k in islands)):
        check_output_folder(folder)
    saves = _measured_saves(recipe, args.output)
    if saves is not None:
        recipe = with_measured_checkpoint_rate(recipe, saves.gbytes_per_second)

    from shardwright.compile import compile_recipe

    compiled = compile_recipe(recipe)
    write_folder(args.output, compiled.files)
    for island, files in enumerate(compiled.islands):
        write_folder(args.output / island_name(island), files)
    remove_surplus_island_plans(args.output, len(compiled.islands))
    print_diagnostics(compiled.warnings, recipe.source)
    if args.json:
        print(as_json(compiled, args.output))
        return 0
    print(summary(compiled, args.output, _interval(recipe, compiled.plan, saves)))
    return 0


def _measured_saves(recipe: Recipe, directory: Path) -> SaveStatistics | None:
    """Of the run in the folder that is compiled anew, where an interval is to be settled and the
    recipe gives no speed (decision 025)."""
    from shardwright.monitor.run_files import read_save_statistics

    settles = (
        recipe.checkpoint.every_steps == "auto"
        and recipe.cluster.checkpoint_gbytes_per_second is None
    )
    return read_save_statistics(directory) if settles else None


def _interval(recipe: Recipe, plan: Plan, saves: SaveStatistics | None) -> str:
    """What `checkpoint.every_steps: auto` became; "" where the recipe says it."""
    if recipe.checkpoint.every_steps != "auto":
        return ""
    every = plan.checkpoint.every_steps
    assert every is not None, "auto is always some steps"
    words = (
        f"every {every:,} steps, "
        f"{format_days(every * plan.predicted.time.step_seconds / SECONDS_PER_DAY)} apart"
    )
    if saves is None:
        return words
    return (
        f"{words}; the run there wrote {format_number(saves.gbytes_per_second)} GB/s a node in "
        f"{saves.count} saves"
    )


def as_json(compiled: CompileResult, directory: Path) -> str:
    plan = compiled.plan
    return strict_json(
        {
            "directory": str(directory),
            "name": plan.name,
            "strategy": asdict(plan.strategy),
            "stages": [asdict(stage) for stage in plan.stages],
            "predicted": asdict(plan.predicted),
            "files": [*sorted(compiled.files), *_island_files(compiled)],
            "warnings": [
                {"code": d.code, "severity": d.severity, "message": d.message}
                for d in compiled.warnings
            ],
        }
    )


def _island_files(compiled: CompileResult) -> list[str]:
    from shardwright.plan.island_plans import island_name

    return [
        f"{island_name(k)}/{name}"
        for k, files in enumerate(compiled.islands)
        for name in sorted(files)
    ]


def summary(compiled: CompileResult, directory: Path, interval: str = "") -> str:
    """What was decided, in the recipe's own words, and the next command. interval: of `every_steps:
    auto`."""
    from shardwright.cost.prediction_errors import error_bar_text
    from shardwright.search.layout_comparison import hpz_text

    plan, model, files = compiled.plan, compiled.plan.model, compiled.files
    s, t, memory, time = plan.strategy, plan.training, plan.predicted.memory, plan.predicted.time
    peak, capacity = memory.peak_bytes / GIB, memory.capacity_bytes / GIB
    islands, of_each = (
        ("", "") if plan.islands == 1 else (f"{plan.islands} islands of ", ", of each island")
    )
    layout, _, settings = s.describe().partition(f" micro_batch_size={s.micro_batch_size} ")
    rows = [
        ("recipe", plan.name),
        (
            "model",
            (
                f"{model.architecture}, {model.total_parameters:,} parameters, "
                f"{weights_summary(model.weights)}"
            ),
        ),
        ("cluster", f"{islands}{plan.nodes} x {plan.gpus_per_node} {plan.gpu}"),
        ("layout", layout),
        ("", settings),
        *([("weights", hpz)] if (hpz := hpz_text(s)) else []),
        (
            "batch",
            (
                f"{t.global_batch_size} = {s.micro_batch_size} x {s.gradient_accumulation_steps} x "
                f"data {s.data}{of_each}"
            ),
        ),
        (
            "training",
            f"{_length(t)} of {t.global_batch_size} x {t.sequence_length} tokens, {t.precision}",
        ),
        *((f"stage {stage.stage}", _stage(stage)) for stage in plan.stages),
        ("memory", f"{peak:.1f} of {capacity:.1f} GiB on the fullest rank, predicted"),
        ("step", f"{time.step_seconds:.3g} s, {time.bubble_fraction:.0%} of it idle, predicted"),
        ("error", error_bar_text(compiled.error)),
        *([("saves", interval)] if interval else []),
        (
            "written",
            (
                f"{len(files) + len(_island_files(compiled))} files in "
                f"{escape_control_characters(str(directory))}"
            ),
        ),
        *_next(plan, directory),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def _next(plan: Plan, directory: Path) -> list[tuple[str, str]]:
    """The commands that start it."""
    place = shell_quoted(str(directory))
    if plan.islands == 1:
        return [("next", f"shardwright run {place}")]
    store = f"shardwright outer-store {place}"
    each = [("", f"shardwright run {place} --island {k}") for k in range(plan.islands)]
    return [("next", f"{store}    (at {plan.launch.outer_store})"), *each]


def _length(training: PlanTraining) -> str:
    return (
        f"{training.steps} steps"
        if training.epochs is None
        else f"{training.epochs:g} epochs, in steps"
    )


def _stage(stage: PlanStage) -> str:
    names = (
        stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} ... {stage.layers[-1]}"
    )
    count = f"{len(stage.layers)} layer{'s' if len(stage.layers) > 1 else ''}"
    return f"{count} on pipeline rank {stage.pipeline_rank}: {names}"
