"""`shardwright run DIR`: train a compiled folder with its engine's launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli.command_options import add_island, island_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a compiled folder; `run` executes its scripts"
    )
    parser.add_argument(
        "--hostfile", type=Path, help="the hosts to run on: one `name slots=N` per line"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): resume from the newest checkpoint if there is one; never: start from "
        "step 1; "
        "PATH: resume from this step folder",
    )
    add_island(
        parser,
        "K|all",
        "with cluster.islands: the island to train; all: every one, and the store, on this machine",
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="keep running without this terminal; see status, logs and stop",
    )


def run(args: argparse.Namespace) -> int:
    if args.island == "all":
        from shardwright.diloco.island_processes import run_all_islands

        return run_all_islands(args.folder, args.resume)
    folder = island_folder(args)
    if args.detach:
        from shardwright.launch.launcher_process import run_detached

        return run_detached(folder, args.hostfile, args.resume)
    from shardwright.launch.launcher_process import run_folder

    return run_folder(folder, args.hostfile, args.resume)
