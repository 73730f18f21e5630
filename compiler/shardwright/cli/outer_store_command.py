"""`shardwright outer-store DIR`: where the islands of a compiled folder meet."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a compiled folder of a recipe with cluster.islands",
    )
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help=(
            "the address to listen at, where it is not the one that islands reach "
            "(launch.outer_store)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    from shardwright.diloco.island_processes import serve_outer_store

    return serve_outer_store(args.folder, args.bind)
