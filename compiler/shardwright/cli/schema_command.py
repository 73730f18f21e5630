"""schema [-o FILE]: the JSON Schema of a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwright.cli.terminal import error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write it to this file instead of standard output",
    )


def run(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_schema import schema_text

    output: Path | None = args.output
    if output is None:
        sys.stdout.write(schema_text())
        return 0
    try:
        output.write_text(schema_text(), encoding="utf-8")
    except OSError as problem:
        error(f"cannot write {output}: {problem.strerror}")
        return 1
    return 0
