"""`shardwright stop DIR`: end a run after its current step, with a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_island, island_folder
from shardwright.diagnostics import refusal

if TYPE_CHECKING:
    from shardwright.launch.run_state import RunState
    from shardwright.plan.plan import Plan

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 10.0
NOT_FINISHED, DETACHED = 3, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    add_island(parser)


def run(args: argparse.Namespace) -> int:
    from shardwright.launch.run_state import is_alive, read_state
    from shardwright.plan.plan import load_plan

    folder = island_folder(args)
    plan = load_plan(folder)
    if not is_alive(folder):
        raise refusal(
            "SW6304",
            f"no run of {str(folder)!r} is alive: its status is {read_state(plan, folder).status}",
            "`shardwright status` says more. A run on hosts that do not share this folder is "
            "stopped by `touch run/stop` in the folder on the first host.",
        )
    (folder / "run" / "stop").touch()
    print("asked to stop: the run ends after its current step, with a checkpoint")
    interrupted = False
    while True:
        try:
            state = _wait(plan, folder)
            break
        except KeyboardInterrupt:
            if interrupted:
                print("no longer waiting; the run ends by itself", file=sys.stderr)
                return DETACHED
            interrupted = True
            print(
                "still waiting for the checkpoint; interrupt again to leave it alone",
                file=sys.stderr,
            )
    at = f"{state.status} at step {state.step} of {state.steps}"
    print(at if state.cause is None else f"{at}: {state.cause}")
    return NOT_FINISHED if state.status == "failed" else 0


def _wait(plan: Plan, folder: Path) -> RunState:
    from shardwright.launch.run_state import read_state
    from shardwright.utils.run_lease import is_locked_by_run

    reported_at = 0.0
    while True:
        state = read_state(plan, folder)
        if state.is_final and not is_locked_by_run(folder):  # the next `run` shall find it free
            return state
        if time.monotonic() - reported_at > PROGRESS_SECONDS:
            reported_at = time.monotonic()
            print(f"{state.status}, step {state.step} of {state.steps}", flush=True)
        time.sleep(POLL_SECONDS)
