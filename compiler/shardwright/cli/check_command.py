"""check R...: stage 1, the files that the recipe names, and what is known of its model without
building it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import print_diagnostics
from shardwright.diagnostics import Diagnostic, Refusal, Source
from shardwright.diagnostics.diagnostic_rendering import (
    diagnostic_to_json,
    escape_control_characters,
)
from shardwright.models.model_files import weights_summary
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.recipe.recipe_types import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="a recipe file; - is standard input"
    )
    add_overrides(parser)
    add_json(parser, "print one JSON object per recipe, one per line")


def run(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_loader import load_recipe

    refused, blocks = False, 0
    for name in args.recipes:
        source: Source | None = None
        diagnostics: tuple[Diagnostic, ...]
        try:
            recipe = load_recipe(Path(name), args.overrides)
            source, diagnostics = recipe.source, findings(recipe)
        except Refusal as refusal:
            source, diagnostics = refusal.source, refusal.diagnostics
        ok = not any(diagnostic.severity == "error" for diagnostic in diagnostics)
        refused |= not ok
        if args.json:
            found = [diagnostic_to_json(diagnostic, source) for diagnostic in diagnostics]
            print(strict_json({"recipe": name, "ok": ok, "diagnostics": found}), flush=True)
            continue
        if diagnostics and blocks:
            sys.stderr.write("\n")
        blocks += len(diagnostics)
        print_diagnostics(diagnostics, source)
        if ok:
            print(
                f"ok {escape_control_characters(name)}: {weights_summary(recipe.model.weights)}",
                flush=True,
            )
    return 1 if refused else 0


def findings(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Of a recipe that passed stage 1: what compile would refuse, as far as no torch is needed to
    tell."""
    from shardwright.cluster.gpu_catalogue import gpu_errors, resolve_cluster
    from shardwright.cost.calibrated_costs import calibration_errors
    from shardwright.engines.engine_table import engines_for
    from shardwright.models.model_check import check_model
    from shardwright.recipe.input_file_checks import check_files
    from shardwright.search.layout_rules import fp16_on_cpu_error, missing_peak_error
    from shardwright.search.runnable_recipes import check_tokenizers

    found = [*gpu_errors(recipe.cluster)]
    if not found:
        cluster, precision = resolve_cluster(recipe.cluster), recipe.training.precision
        found += [
            d
            for d in (missing_peak_error(precision, cluster), fp16_on_cpu_error(precision, cluster))
            if d is not None
        ]
    found += [*check_files(recipe), *check_model(recipe), *check_tokenizers(recipe)]
    refused = [engine.sbatch_option_errors(recipe) for engine in engines_for(recipe.target)]
    found += [*(refused[0] if all(refused) else ()), *calibration_errors(recipe)]
    by_code_and_key: dict[tuple[str, object], Diagnostic] = {}
    for diagnostic in found:
        by_code_and_key.setdefault((diagnostic.code, diagnostic.key), diagnostic)
    return tuple(by_code_and_key.values())
