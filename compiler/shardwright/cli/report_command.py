"""`shardwright report DIR -o F.html`: a compiled folder, and its run, as one page. --trace: its
step for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli.command_options import add_json
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the HTML file to write"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write the predicted step for Perfetto or chrome://tracing",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shardwright.report.report_files import write_report

    written = write_report(args.folder, args.output, args.trace)
    if args.json:
        print(
            strict_json({"files": [{"path": str(path), "bytes": size} for path, size in written]})
        )
        return 0

    for path, size in written:
        print(f"written   {escape_control_characters(str(path))} ({format_bytes(size)})")
    return 0
