"""`shardwright import ds_config.json [--launch "..."]`: a recipe out of a DeepSpeed configuration
and the command that starts it. Imports neither torch nor DeepSpeed, and runs nothing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_recipe_output
from shardwright.cli.terminal import error, shell_quoted
from shardwright.diagnostics import Diagnostic, Refusal, refusal
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters

if TYPE_CHECKING:
    from shardwright.migrate.config_import import ImportedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="DS_CONFIG",
        help="a ds_config.json; - is standard input (default: the file that --launch names)",
    )
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help="the command that starts training, in quotes: deepspeed, accelerate launch, torchrun "
        "or python, with "
        "the script's arguments",
    )
    parser.add_argument(
        "--model", metavar="M", help="a hub id or model folder, if the command does not name one"
    )
    add_recipe_output(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the recipe, or writes it with -o. Raises Refusal: SW1451 to SW1453, and lint's of a
    file."""
    from shardwright.migrate.config_import import convert_config
    from shardwright.migrate.recipe_draft import draft_yaml

    output: Path | None = args.output
    if args.file is None and args.launch is None:
        error("give a ds_config.json, or the --launch that names one")
        return 1
    if output is not None and os.path.lexists(output):
        raise _unwritten(output, "it is there already, and import replaces nothing")
    folder = os.path.abspath(output.parent if output is not None else ".")
    imported = convert_config(args.file, args.launch, args.model, folder)
    text = draft_yaml(imported.draft, imported.name, _heading(args, imported))
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            raise _unwritten(output, problem.strerror or str(problem)) from None
    _report(imported, text, output)
    return 0


def _heading(args: argparse.Namespace, imported: ImportedRecipe) -> list[str]:
    of = imported.document.name if imported.document is not None else "a launch command"
    lines = [f"Made by `shardwright import` of {of}. Behind each value stands where it comes from."]
    if imported.draft.fill:
        lines.append(
            f"FILL_IN: {', '.join(imported.draft.fill)}; `shardwright check` names what is left."
        )
    return lines


def _report(imported: ImportedRecipe, text: str, output: Path | None) -> None:
    """What was done, on standard error: the recipe may be on standard output."""
    draft = imported.draft
    name = "the recipe" if output is None else shell_quoted(str(output))
    print(
        f"{len(draft.carried)} settings carried, {len(draft.left)} not: a comment each says why",
        file=sys.stderr,
    )
    if draft.fill:
        print("fill in:", file=sys.stderr)
        for key, what in draft.fill.items():
            print(escape_control_characters(f"  {key}  {what}"), file=sys.stderr)
    for found in _other_errors(text, output):
        print(
            escape_control_characters(f"{found.severity}[{found.code}]: {found.message}"),
            file=sys.stderr,
        )
    print(f"next: shardwright check {name}", file=sys.stderr)


def _other_errors(text: str, output: Path | None) -> tuple[Diagnostic, ...]:
    """What `check` will say beside the values to fill in: a batch that does not divide, say."""
    from shardwright.recipe.recipe_loader import load_recipe

    try:
        load_recipe(Path("-"), (), stdin_text=text)
    except Refusal as refusal:
        return tuple(d for d in refusal.diagnostics if d.code != "SW1108")
    return ()


def _unwritten(output: Path, why: str) -> Refusal:
    return refusal("SW1453", f"{str(output)!r} cannot be written: {why}", "Give -o another name.")
