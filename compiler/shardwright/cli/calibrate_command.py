"""`shardwright calibrate RECIPE [-o FILE]`: measures this machine for the recipe;
`cluster.measured` names the file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli.command_options import add_json, add_overrides
from shardwright.cli.terminal import error, shell_quoted

CPU_MINUTES, GPU_MINUTES = 0.5, 5.0
FILE = "measured.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="whose shapes, precision and slots are measured"
    )
    add_overrides(parser)
    help = (
        f"how long to measure, beside building the copies (default {CPU_MINUTES:g} on a CPU, "
        f"{GPU_MINUTES:g} on a GPU)"
    )
    parser.add_argument("--minutes", type=minutes, metavar="N", help=help)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(FILE),
        metavar="FILE",
        help=f"the file to write (default {FILE})",
    )
    add_json(parser, "print the figures as one JSON object, as the file has them")


def minutes(text: str) -> float:
    """The type of an option that is a time."""
    value = float(text)
    if not 0.01 <= value <= 1440:
        raise argparse.ArgumentTypeError("must be between 0.01 and 1440")
    return value


def run(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_loader import load_recipe

    if not args.output.parent.is_dir():
        error(f"-o: {args.output.parent} is not a folder")
        return 1
    recipe = load_recipe(args.recipe, args.overrides)
    from dataclasses import asdict

    from shardwright.calibrate.calibration import calibrate
    from shardwright.cli.estimate_command import measurement_lines
    from shardwright.utils.file_io import write_atomically
    from shardwright.utils.json_values import strict_json
    from shardwright.utils.sigterm_interrupt import sigterm_as_interrupt

    limit = args.minutes or (CPU_MINUTES if recipe.cluster.gpu == "cpu" else GPU_MINUTES)
    with sigterm_as_interrupt():
        done = calibrate(recipe, 60 * limit, lambda text: print(text, file=sys.stderr, flush=True))
    text = strict_json(asdict(done.found))
    write_atomically(args.output, text + "\n")
    if args.json:
        print(text)
        return 0
    print("\n".join(measurement_lines(done.found)))
    for each in done.skipped:
        print(f"not measured: {each}", file=sys.stderr)
    print(f"written      {args.output}")
    print(
        f"next         cluster.measured: {shell_quoted(str(args.output))} in the recipe, then "
        "`shardwright plan`"
    )
    return 0
