"""`shardwright explain`: what a diagnostic code means (SW1234); why a plan is what it is (of a
recipe or of a compiled folder); why it is not another one (`--why-not`); how a profiled step
differs from it (`--trace`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides, positive
from shardwright.cli.terminal import error, print_diagnostics
from shardwright.diagnostics import Refusal
from shardwright.utils.json_values import JsonDocument, strict_json

if TYPE_CHECKING:
    from shardwright.diagnostics.code_explanations import CodeExplanation

WIDTH = 100


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="DIR|RECIPE|CODE",
        help="a compiled folder, a recipe, or a code that a command printed, such as SW4112",
    )
    parser.add_argument(
        "--why-not",
        metavar="KEY=VALUE,...",
        help="ask why the plan is not this layout; keys of the parallelism section, such as "
        "tensor=8,pipeline=2, "
        "target, or islands (1: all nodes as one world)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="compare the plan with a real step, line by line: traces of torch.profiler (one a "
        "rank, also .gz) and CUDA memory snapshots",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="how many steps the traces hold, where the profiler did not mark them (default 1)",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="write what the traces correct, for cluster.measured of the recipe",
    )
    add_overrides(parser)
    add_json(parser)


def run_explain(args: argparse.Namespace) -> int:
    """Exit 1 where the plan that is explained does not run; --why-not has answered in any case."""
    # A code, unless a file or folder has that name.
    is_path = os.path.exists(args.subject) or args.subject == "-"
    if not is_path and re.fullmatch(r"\w+", args.subject):
        return _explain_code(args)
    if args.overrides and os.path.isdir(args.subject):
        error("--set changes a recipe; a compiled folder is what it is")
        return 1
    if wrong := _usage_error(args):
        error(wrong)
        return 1
    try:
        if args.trace is not None:
            from shardwright.cli.explain_trace import run_explain_trace

            return run_explain_trace(
                args.subject,
                args.overrides,
                args.trace,
                steps=args.steps,
                calibrate=args.calibrate,
                as_json=args.json,
            )
        if args.why_not is not None:
            from shardwright.cli.explain_plan import run_why_not

            return run_why_not(args.subject, args.overrides, args.why_not, as_json=args.json)
        from shardwright.cli.command_options import read_priced_recipe
        from shardwright.cli.explain_plan import (
            explain_priced_recipe,
            explanation_json,
            explanation_page,
        )

        subject = read_priced_recipe(args.subject, args.overrides)
        found = explain_priced_recipe(subject)
        print(
            strict_json(explanation_json(subject, found))
            if args.json
            else explanation_page(subject, found),
            flush=True,
        )
        if not args.json:
            print_diagnostics(found.chosen.diagnostics, subject.recipe.source)
        return 0 if found.chosen.feasible else 1
    except Refusal as refusal:
        if not args.json:
            raise
        from shardwright.cli.estimate_command import print_infeasible_json

        print_infeasible_json(args.subject, refusal)
        return 1


def _usage_error(args: argparse.Namespace) -> str:
    if args.trace is None:
        alone = [name for name in ("steps", "calibrate") if getattr(args, name) is not None]
        return f"--{alone[0]} needs --trace FILE" if alone else ""
    if args.why_not is not None:
        return "--trace and --why-not ask different questions: give one of them"
    if args.calibrate is not None and not args.calibrate.parent.is_dir():
        return f"--calibrate: {args.calibrate.parent} is not a folder"
    return ""


def _explain_code(args: argparse.Namespace) -> int:
    from shardwright.diagnostics.code_explanations import explanation
    from shardwright.diagnostics.code_registry import CODES

    if args.why_not is not None or args.overrides or args.trace is not None:
        error("--why-not, --trace and --set are for a recipe or a compiled folder")
        return 1
    code = args.subject.upper()
    if not re.fullmatch(r"SW\d{4}", code):
        error(
            f"{args.subject!r} is no code, file or folder; a code is SW and four digits, as in "
            "`error[SW4112]`"
        )
        return 1
    found = explanation(code)
    if found is None:
        import difflib

        close = difflib.get_close_matches(code, CODES, n=1)
        error(f"there is no code {code}" + (f"; did you mean {close[0]}?" if close else ""))
        return 1
    keys = ("code", "title", "what", "why", "example", "instead", "source")
    document: JsonDocument = {key: getattr(found, key) for key in keys}
    print(strict_json(document) if args.json else code_page(found))
    return 0


def code_page(found: CodeExplanation) -> str:
    """Return the text of one code; only its title where the registry has no more."""
    lines = [f"{found.code}: {found.title}"]
    for part in (found.what, found.why):
        if part:
            lines += [
                "",
                *textwrap.wrap(part, WIDTH, break_long_words=False, break_on_hyphens=False),
            ]
    flags = [f"--for {found.audience}"] * bool(found.audience)
    flags += [f"--world-size {found.world_size}"] * bool(found.world_size)
    needs = f" (lint {' '.join(flags)})" if flags else ""
    for title, text in ((f"Example:{needs}", found.example), ("Instead:", found.instead)):
        if len(text) > WIDTH:
            with contextlib.suppress(ValueError):
                text = json.dumps(json.loads(text), indent=2)
        if text.strip():
            lines += ["", title, *(f"  {line}" for line in text.splitlines())]
    if found.source:
        lines += ["", *textwrap.wrap(f"Source: {found.source}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)
