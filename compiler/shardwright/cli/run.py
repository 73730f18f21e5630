"""`shardwright run DIR`: train a compiled folder under the deepspeed launcher."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a folder that `compile` wrote; its scripts are executed"
    )
    parser.add_argument("--hostfile", type=Path, help="hosts to run on, a line `name slots=N` each")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): from the newest checkpoint, else start; never: start; PATH: one step folder",
    )
    parser.add_argument("--detach", action="store_true", help="go on without this terminal; see status, logs and stop")


def run(args: argparse.Namespace) -> int:
    if args.detach:
        from shardwright.launch.detach import run_detached

        return run_detached(args.folder, args.hostfile, args.resume)
    from shardwright.launch.run import run_folder

    return run_folder(args.folder, args.hostfile, args.resume)
