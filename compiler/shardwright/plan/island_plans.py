"""The plans of islands: a plan each, the same but for who it is and where it writes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import canonical_hash


def island_name(island: int) -> str:
    """Its folder in the compiled one."""
    return f"island-{island}"


def island_plan(plan: Plan, island: int) -> Plan:
    """What this island runs. What several would write to one place gets its name."""
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
    """The same on every island of a plan, and of no other: all that decides what is trained. Not
    how and where its ranks are started."""
    island_label = {"name", "launch", "checkpoint", "outer", "tracking"}
    document = {key: value for key, value in asdict(plan).items() if key not in island_label}
    outer = None if plan.outer is None else asdict(replace(plan.outer, island=None))
    return canonical_hash({**document, "outer": outer})


def island_folders(plan: Plan, folder: Path) -> list[Path]:
    """Of every island; [] for a plan without any, or of one island."""
    return [folder / island_name(k) for k in plan.island_numbers]


def select_island_folder(plan: Plan, folder: Path, island: int | None) -> Path:
    """The folder that `run` and its like take: an island's own where it is asked for. Raises
    Refusal: SW6014 where the plan has islands and none of them is named, or the other way round."""
    folders = island_folders(plan, folder)
    if island is None and not folders:
        return folder
    if island is None:
        help = (
            f"Give `--island 0` to `--island {len(folders) - 1}`. `run` takes `all`, too: on "
            "this machine."
        )
        raise refusal(
            "SW6014",
            f"the plan is of {len(folders)} islands, and each is looked at by itself",
            help,
        )
    if not folders:
        message = f"--island {island}: the plan of {str(folder)!r} has no islands"
        raise refusal(
            "SW6014", message, "Leave --island out, or compile a recipe with cluster.islands."
        )
    if not 0 <= island < len(folders):
        message = f"--island {island}: the islands of this plan are 0 to {len(folders) - 1}"
        raise refusal("SW6014", message, "Give one of them.")
    return folders[island]
