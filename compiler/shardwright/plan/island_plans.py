"""Derive the plan of each DiLoCo island: equal but for the island's number and output paths."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import canonical_hash


def island_name(island: int) -> str:
    """Return the name of the island's folder inside the compiled one."""
    return f"island-{island}"


def island_plan(plan: Plan, island: int) -> Plan:
    """Return the plan that this island runs; outputs of several islands get its name."""
    checkpoint, island_label = plan.checkpoint, island_name(island)
    if checkpoint.directory.startswith("/"):
        checkpoint = replace(
            checkpoint, directory=f"{checkpoint.directory.rstrip('/')}/{island_label}"
        )
    if checkpoint.upload_to is not None:
        checkpoint = replace(
            checkpoint, upload_to=f"{checkpoint.upload_to.rstrip('/')}/{island_label}"
        )
    outer = replace(plan.diloco, island=island)
    return replace(plan, name=f"{plan.name}-{island_label}", checkpoint=checkpoint, outer=outer)


def plan_digest(plan: Plan) -> str:
    """Return a digest of all that decides training; it is the same on every island.

    How and where ranks start is not included.
    """
    island_label = {"name", "launch", "checkpoint", "outer", "tracking"}
    document = {key: value for key, value in asdict(plan).items() if key not in island_label}
    outer = None if plan.outer is None else asdict(replace(plan.outer, island=None))
    return canonical_hash({**document, "outer": outer})


def island_folders(plan: Plan, folder: Path) -> list[Path]:
    """Return every island's folder; [] for a plan without islands or with one."""
    return [folder / island_name(k) for k in plan.island_numbers]


def select_island_folder(plan: Plan, folder: Path, island: int | None) -> Path:
    """Return the folder that `run` and similar commands use: the named island's own folder.

    Raises Refusal with SW6014 where the plan has islands and none is named, or the reverse.
    """
    folders = island_folders(plan, folder)
    if island is None and not folders:
        return folder
    if island is None:
        help = (
            f"Pass `--island 0` to `--island {len(folders) - 1}`. `run` also takes `--island all`, "
            "which starts them all on this machine."
        )
        raise refusal(
            "SW6014",
            f"the plan has {len(folders)} islands, and this command needs one of them",
            help,
        )
    if not folders:
        message = f"--island {island}: the plan in {str(folder)!r} has no DiLoCo islands"
        raise refusal(
            "SW6014", message, "Leave --island out, or compile a recipe with cluster.islands."
        )
    if not 0 <= island < len(folders):
        message = f"--island {island}: the islands of this plan are 0 to {len(folders) - 1}"
        raise refusal("SW6014", message, "Pass one of these numbers.")
    return folders[island]
