"""`shardwright explain`: what a diagnostic code means (SW1234); why a plan is what it is (of a
recipe or of a compiled folder); why it is not another one (`--why-not`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import textwrap
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import error, print_diagnostics
from shardwright.diagnostics import Refusal
from shardwright.utils.json_values import strict_json

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
    add_overrides(parser)
    add_json(parser)


def run_explain(args: argparse.Namespace) -> int:
    """Exit 1 where the plan that is explained does not run; --why-not has answered in any case."""
    if _is_code(args.subject):
        return _explain_code(args)

    if args.overrides and os.path.isdir(args.subject):
        error("--set changes a recipe; a compiled folder is what it is")
        return 1
    try:
        return _explain_plan(args)
    except Refusal as refusal:
        if not args.json:
            raise
        from shardwright.cli.estimate_command import print_infeasible_json

        print_infeasible_json(args.subject, refusal)
        return 1


def _explain_plan(args: argparse.Namespace) -> int:
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


def _is_code(word: str) -> bool:
    """Return whether a word is meant as a code: no file or folder has that name."""
    if os.path.exists(word) or word == "-":
        return False
    return re.fullmatch(r"\w+", word) is not None


def _explain_code(args: argparse.Namespace) -> int:
    from shardwright.diagnostics.code_explanations import explanation

    if args.why_not is not None or args.overrides:
        error("--why-not and --set are for a recipe or a compiled folder")
        return 1
    found = explanation(args.subject.upper())
    if found is None:
        error(_no_code(args.subject))
        return 1
    print(strict_json(_object(found)) if args.json else code_page(found))
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
    for title, text in (("Example", found.example), ("Instead", found.instead)):
        if text.strip():
            lines += [
                "",
                f"{title}:{_flags(found) if title == 'Example' else ''}",
                *_indented(text),
            ]
    if found.source:
        lines += ["", *textwrap.wrap(f"Source: {found.source}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    """Indent an example; a long one that is JSON is broken into lines."""
    if len(text) > WIDTH:
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2)
    return [f"  {line}" for line in text.splitlines()]


def _flags(found: CodeExplanation) -> str:
    flags = [f"--for {found.audience}"] * bool(found.audience)
    flags += [f"--world-size {found.world_size}"] * bool(found.world_size)
    return f" (lint {' '.join(flags)})" if flags else ""


def _object(found: CodeExplanation) -> dict[str, str]:
    keys = ("code", "title", "what", "why", "example", "instead", "source")
    return {key: getattr(found, key) for key in keys}


def _no_code(word: str) -> str:
    import difflib

    from shardwright.diagnostics.code_registry import CODES

    if not re.fullmatch(r"SW\d{4}", word, re.IGNORECASE):
        return (
            f"{word!r} is no code, file or folder; a code is SW and four digits, as in "
            "`error[SW4112]`"
        )
    close = difflib.get_close_matches(word.upper(), CODES, n=1)
    return f"there is no code {word.upper()}" + (f"; did you mean {close[0]}?" if close else "")
