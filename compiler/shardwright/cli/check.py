"""check R...: stage 1, the GPU's name, and the files that the recipe names."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="a recipe file; - is standard input")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, as training.steps=10"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a recipe, one a line")


def run(args: argparse.Namespace) -> int:
    from shardwright.cli.console import print_diagnostics
    from shardwright.cluster.resolve import gpu_errors
    from shardwright.diagnostics import Diagnostic, Refusal, Source
    from shardwright.diagnostics.render import to_json, visible
    from shardwright.recipe.files import check_files
    from shardwright.recipe.load import load_recipe

    refused, blocks = False, 0
    for name in args.recipes:
        source: Source | None = None
        diagnostics: tuple[Diagnostic, ...]
        try:
            recipe = load_recipe(Path(name), args.set)
            source, diagnostics = recipe.source, (*gpu_errors(recipe.cluster), *check_files(recipe))
        except Refusal as refusal:
            source, diagnostics = refusal.source, refusal.diagnostics
        ok = not any(diagnostic.severity == "error" for diagnostic in diagnostics)
        refused |= not ok
        if args.json:
            found = [to_json(diagnostic, source) for diagnostic in diagnostics]
            print(json.dumps({"recipe": name, "ok": ok, "diagnostics": found}), flush=True)
            continue
        if diagnostics and blocks:
            sys.stderr.write("\n")
        blocks += len(diagnostics)
        print_diagnostics(diagnostics, source)
        if ok:
            print(f"ok {visible(name)}", flush=True)
    return 1 if refused else 0
