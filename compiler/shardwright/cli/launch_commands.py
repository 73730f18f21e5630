"""`shardwright run`, `outer-store`, `stop` and `doctor`: start, end and check the run of a
compiled folder."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import (
    add_folder,
    add_hostfile,
    add_island,
    add_json,
    island_folder,
)
from shardwright.diagnostics import Refusal, refusal
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.diagnostics.host_check import HostCheck
    from shardwright.launch.run_state import RunState
    from shardwright.plan.plan import Plan


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, "a compiled folder; `run` executes its scripts")
    add_hostfile(parser, "run on")
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
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="restart the run where it ends early, as launch.recovery says",
    )


def run_run(args: argparse.Namespace) -> int:
    if args.supervise and args.island is not None:
        raise refusal(
            "SW5214",
            "--supervise does not restart islands: each one ends by itself",
            "Leave --supervise out, and start an island that ended again.",
        )
    if args.island == "all":
        from shardwright.diloco.island_processes import run_all_islands

        return run_all_islands(args.folder, args.resume)
    from shardwright.launch.launcher_process import run_detached, run_folder

    folder = island_folder(args)
    if args.detach:
        options = ["--supervise"] if args.supervise else []
        return run_detached(folder, args.hostfile, args.resume, *options)
    if args.supervise:
        from shardwright.supervise.supervisor import supervise

        return supervise(folder, args.hostfile, args.resume)
    return run_folder(folder, args.hostfile, args.resume)


# `shardwright outer-store DIR`: where the islands of a compiled folder meet.


def add_outer_store_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, "a compiled folder of a recipe with cluster.islands")
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        help=(
            "the address to listen at, where it is not the one that islands reach "
            "(launch.outer_store)"
        ),
    )


def run_outer_store(args: argparse.Namespace) -> int:
    from shardwright.diloco.island_processes import serve_outer_store

    return serve_outer_store(args.folder, args.bind)


# `shardwright stop DIR`: end a run after its current step, with a checkpoint.


POLL_SECONDS = 0.5
PROGRESS_SECONDS = 10.0
NOT_FINISHED, DETACHED = 3, 130


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    add_island(parser)


def run_stop(args: argparse.Namespace) -> int:
    from shardwright.launch.run_state import is_alive, read_state
    from shardwright.plan.plan import load_plan
    from shardwright.train.run_attempt import SUPERVISOR_STOP, supervisor_owner

    folder = island_folder(args)
    plan = load_plan(folder)
    supervised = supervisor_owner(folder) is not None
    if supervised:
        (folder / SUPERVISOR_STOP).touch()
    if not is_alive(folder) and not supervised:
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
    print(escape_control_characters(at if state.cause is None else f"{at}: {state.cause}"))
    return NOT_FINISHED if state.status == "failed" else 0


def _wait(plan: Plan, folder: Path) -> RunState:
    from shardwright.launch.run_state import read_state
    from shardwright.train.run_attempt import supervisor_owner
    from shardwright.utils.run_lease import is_locked_by_run

    reported_at = 0.0
    while True:
        state = read_state(plan, folder)
        # The next `run` shall find it free.
        is_free = not is_locked_by_run(folder) and supervisor_owner(folder) is None
        if state.is_final and is_free:
            return state
        if time.monotonic() - reported_at > PROGRESS_SECONDS:
            reported_at = time.monotonic()
            print(f"{state.status}, step {state.step} of {state.steps}", flush=True)
        time.sleep(POLL_SECONDS)


# `shardwright doctor DIR`: try the hosts before anything is started on them.


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    add_hostfile(parser, "check")
    add_island(parser)
    add_json(parser)


def run_doctor(args: argparse.Namespace) -> int:
    from shardwright.cost.diloco_costs import inner_step_seconds, islands_cost
    from shardwright.diloco.link_probe import PlannedLink, check_outer_store_link
    from shardwright.plan.plan import load_plan
    from shardwright.recipe.recipe_loader import load_recipe

    folder = island_folder(args)
    plan = load_plan(folder)
    checks = list(_checks(plan, folder, args.hostfile))
    if plan.islands > 1:
        step = inner_step_seconds(plan.predicted.time)
        cost = islands_cost(
            load_recipe(folder / "recipe.resolved.json"), plan.model.total_parameters, step
        )
        assert cost is not None, "a plan of islands has a recipe of them"
        planned = PlannedLink(
            gbits_per_second=cost.link_gbits_per_second,
            outer_seconds=cost.outer_seconds,
            between_seconds=cost.every_steps * step,
        )
        checks.append(check_outer_store_link(plan, folder, planned))
    print(checks_json(checks) if args.json else checks_text(checks))
    return 1 if any(check_has_errors(check) for check in checks) else 0


def _checks(plan: Plan, folder: Path, hostfile: Path | None) -> Sequence[HostCheck]:
    """Check the hosts that a scheduler or a hostfile names, else this node alone.

    The names in a compiled hostfile of the latter two are made up, and nobody asks for them.
    """
    from shardwright.diagnostics.host_check import skipped_check
    from shardwright.launch.host_checks import PlannedBandwidth, check_hosts
    from shardwright.launch.launchers.job_scheduler import scheduler_of
    from shardwright.launch.launchers.launcher_table import LAUNCHERS
    from shardwright.launch.preflight_checks import hostfile_errors, scheduler_errors
    from shardwright.layout.gpu_cluster import resolve_cluster
    from shardwright.recipe.recipe_loader import load_recipe

    cluster = resolve_cluster(load_recipe(folder / "recipe.resolved.json").cluster)
    shared, launcher = cluster.shared_filesystem, LAUNCHERS[plan.launch.launcher]
    assumed = PlannedBandwidth(
        intra_node_bytes_per_second=cluster.intra_node_bytes_per_second,
        inter_node_bytes_per_second=cluster.inter_node_bytes_per_second,
        is_cpu=cluster.gpu.is_cpu,
    )
    if launcher.scheduler:
        if hostfile is not None:
            raise Refusal(*hostfile_errors(plan, folder, hostfile))
        if not launcher.is_allocated:
            return tuple(scheduler_of(plan).checks(plan, folder, shared=shared))
        recovery = plan.launch.recovery
        if obstacles := tuple(scheduler_errors(plan, recovery.spares if recovery else 0)):
            raise Refusal(*obstacles)
        if plan.launch.slurm is not None and plan.launch.slurm.container is not None:
            return (skipped_check("nodes", "the ranks' container is not entered"),)
        return check_hosts(
            plan, folder, scheduler_of(plan).allocated_hosts(), assumed, reach="srun", shared=shared
        )
    if plan.nodes > 1 and launcher.by_hand and hostfile is None:
        told = (
            f"the other {plan.nodes - 1}: run doctor on each, or give --hostfile where ssh "
            "reaches them"
        )
        here = check_hosts(plan, folder, ["this node"], assumed, reach="local", shared=shared)
        return (*here, skipped_check("nodes", told))
    hosts = read_hostfile(plan, folder, hostfile)
    return check_hosts(
        plan, folder, hosts, assumed, reach="local" if plan.nodes == 1 else "ssh", shared=shared
    )


def read_hostfile(plan: Plan, folder: Path, hostfile: Path | None) -> list[str]:
    """Return the hosts of a run, and the spare ones. Raises Refusal where the hostfile is missing,
    cannot be read, or is not the plan's cluster."""
    from shardwright.launch.preflight_checks import read_hosts_and_spares

    if plan.nodes == 1:
        return ["localhost"]
    return [host.name for host in read_hosts_and_spares(plan, folder, hostfile)]


def check_has_errors(check: HostCheck) -> bool:
    """Return whether a run would fail; a warning (a slow link) stops none."""
    return any(problem.severity == "error" for problem in check.problems)


def checks_text(checks: Sequence[HostCheck]) -> str:
    lines = []
    for check in checks:
        if not check_has_errors(check):
            label = "ok  " if check.checked else "skip"
            lines.append(f"{label} {check.name:<13}{escape_control_characters(check.told)}")
        for problem in check.problems:
            label = "red " if problem.severity == "error" else "warn"
            lines.append(
                f"{label} {check.name:<13}{problem.code} "
                f"{escape_control_characters(problem.message)}"
            )
            lines.append(f"     {'':<13}{escape_control_characters(problem.help)}")
    red = sum(problem.severity == "error" for check in checks for problem in check.problems)
    well = (
        "all is well" if all(check.checked for check in checks) else "what could be checked is well"
    )
    lines.append(f"{well}: `shardwright run`" if not red else f"{red} found; nothing was started")
    return "\n".join(lines)


def checks_json(checks: Sequence[HostCheck]) -> str:
    keys = ("code", "severity", "message", "help")
    rows = [
        {
            "name": check.name,
            "ok": not check_has_errors(check),
            "checked": check.checked,
            "told": check.told,
            "problems": [{key: getattr(p, key) for key in keys} for p in check.problems],
        }
        for check in checks
    ]
    return strict_json({"ok": all(row["ok"] for row in rows), "checks": rows})
