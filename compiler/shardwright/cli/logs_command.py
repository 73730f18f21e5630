"""`shardwright logs DIR`: what a run says, or one of its ranks."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_island, island_folder
from shardwright.diagnostics import Refusal, refusal

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

POLL_SECONDS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="show this rank's own output (default: the launcher's)",
    )
    add_island(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until the run ends"
    )


def run(args: argparse.Namespace) -> int:
    from shardwright.launch.run_state import is_alive
    from shardwright.plan.plan import load_plan

    folder = island_folder(args)
    plan = load_plan(folder)
    path = log_path(plan, folder, args.rank)
    if not path.exists() and not (args.follow and is_alive(folder)):
        raise _no_log(plan, path, args.rank)
    _show(plan, path, folder, follow=args.follow)
    return 0


def log_path(plan: Plan, folder: Path, rank: int | None) -> Path:
    """Rank 0's output is the launcher's. Raises Refusal for a rank that the plan does not have."""
    last = len(plan.ranks) - 1
    if rank is not None and not 0 <= rank <= last:
        raise refusal("SW6305", f"there is no rank {rank}", f"The plan has ranks 0 to {last}.")
    return (
        folder / "run" / "logs" / f"rank-{rank:05d}.log"
        if rank
        else folder / "run" / "launcher.log"
    )


def _no_log(plan: Plan, path: Path, rank: int | None) -> Refusal:
    where = ""
    if rank:
        line = plan.ranks[rank].node + 1
        where = (
            f" Without a shared file system it lies on the rank's own host, line {line} of the "
            "hostfile."
        )
    return refusal(
        "SW6305", f"there is no {str(path)!r}", f"It is written once the run has started.{where}"
    )


def _show(plan: Plan, path: Path, folder: Path, *, follow: bool) -> None:
    """A new attempt writes a new file: then from its beginning."""
    from shardwright.launch.run_state import is_alive, read_state

    while follow and not path.exists() and is_alive(folder):
        time.sleep(POLL_SECONDS)
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        while True:
            # Asked before the last read: nothing that comes after it is missed.
            alive = follow and is_alive(folder) and not read_state(plan, folder).is_final
            for text in file:
                print(text, end="", flush=True)
            if not alive:
                return
            time.sleep(POLL_SECONDS)
            if path.exists() and path.stat().st_size < file.tell():
                file.seek(0)
