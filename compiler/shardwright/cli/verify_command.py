"""`shardwright verify R`: does this recipe's layout compute what one process computes? A tiny copy,
on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import print_diagnostics
from shardwright.diagnostics import Diagnostic, Refusal, found

if TYPE_CHECKING:
    from shardwright.verify.layout_verification import Comparison, VerificationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="the recipe file")
    add_overrides(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit 1 where the tiny copy computes something else."""
    from shardwright.recipe.recipe_loader import load_recipe
    from shardwright.verify.layout_verification import verify_recipe

    recipe = load_recipe(args.recipe, args.overrides)

    def say(stage: str) -> None:
        if not args.json:
            print(f"... {stage}", file=sys.stderr, flush=True)

    try:
        verdict = verify_recipe(recipe, say)
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source or recipe.source) from None
    print(_as_json(str(args.recipe), verdict) if args.json else _as_text(recipe.name, verdict))
    if verdict.matches:
        return 0
    print_diagnostics((_mismatch(verdict),), None)
    return 1


def _mismatch(verdict: VerificationResult) -> Diagnostic:
    wrong = [check for check in verdict.checks if not check.passed]
    off = ", ".join(
        f"{check.name} off by {check.worst:.2g} (limit {check.limit:g})" for check in wrong
    )
    help = (
        "Do not pay for this run. Please report it with the recipe; another layout of `plan` "
        "may be right."
    )
    return found(
        "SW5401", None, f"{verdict.verified} does not train as one process does: {off}", help
    )


def _as_json(path: str, verdict: VerificationResult) -> str:
    checks = [
        {**dataclasses.asdict(check), "worst": _number(check.worst), "passed": check.passed}
        for check in verdict.checks
    ]
    document = {
        "recipe": path,
        "same": verdict.matches,
        **dataclasses.asdict(verdict),
        "checks": checks,
    }
    return json.dumps(document, allow_nan=False)


def _number(worst: float) -> float | None:
    """JSON has no infinity."""
    return worst if math.isfinite(worst) else None


def _as_text(name: str, verdict: VerificationResult) -> str:
    rows = [
        ("recipe", name),
        ("layout", verdict.layout),
        ("tried as", verdict.verified),
        ("on", f"{verdict.architecture}, {verdict.parameters:,} parameters, fp32, CPU"),
        *((check.name, _row(check)) for check in verdict.checks),
        (
            "verdict",
            (
                f"{'the matches as one process' if verdict.matches else 'NOT the matches'}, in "
                f"{verdict.seconds:.0f} s"
            ),
        ),
    ]
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in rows)


def _row(check: Comparison) -> str:
    mark = "ok " if check.passed else "BAD"
    return f"{mark}  off by {check.worst:<8.2g} limit {check.limit:<6g} {check.what}".rstrip()
