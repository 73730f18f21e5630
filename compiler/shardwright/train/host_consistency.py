"""Check that the world is the plan's, and that folder and data are the same on every host.

No torch at module level: `run` checks this host's folder in the user's shell; the ranks compare
their hosts'.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shardwright.checkpoint.checkpoint_manifest import checksum
from shardwright.data.dataset import data_fingerprints
from shardwright.diagnostics import Diagnostic, Refusal, found, refusal
from shardwright.engines.engine_table import engine_of
from shardwright.plan.folder_paths import MODEL_DIRECTORY, PLAN_FILE
from shardwright.plan.plan import Plan

_Made = TypeVar("_Made")

ABSENT = "absent"
Digests = Mapping[str, str]
"""Maps a file of the folder, or data.path, to its sha256 (hex), or ABSENT."""


def check_world(plan: Plan) -> None:
    """Raise Refusal, SW6003, where the launcher started another number of ranks than planned."""
    world = int(os.environ["WORLD_SIZE"])
    if world != plan.strategy.world_size:
        raise refusal(
            "SW6003",
            f"the launcher started {world} ranks, the plan is for {plan.strategy.world_size} "
            f"({plan.nodes} x {plan.gpus_per_node})",
            "Start it on the hosts that the plan was made for, or compile for this cluster.",
        )


def check_folder_digests(plan: Plan, folder: Path) -> None:
    """Raise Refusal, SW6010, where a file that a run reads as data was edited since the compile.

    Scripts may be edited.
    """
    if changed := _edited_files(plan, {name: _digest(folder / name) for name in plan.digests}):
        raise Refusal(*changed)


def check_same_files_on_hosts(plan: Plan, folder: Path) -> None:
    """Raise the same Refusal on all ranks where hosts have different files or edited ones.
    Collective."""
    names = (PLAN_FILE, *plan.digests)
    gathered = _gather(lambda: {name: _digest(folder / name) for name in names})
    if (
        diagnostic := host_difference(
            gathered, "Every host reads its own copy of the folder: copy it there again."
        )
    ) or (diagnostic := next(iter(_edited_files(plan, gathered[0][1])), None)):
        raise Refusal(diagnostic)


def check_same_data_on_hosts(plan: Plan, folder: Path) -> Digests:
    """Return the digests of the prepared data; raise Refusal where hosts differ. Collective."""
    gathered = _gather(lambda: data_fingerprints(plan, folder))
    help_text = (
        "Bring the same data to every host, or `shardwright prepare` on one and copy its "
        "run/data to the others."
    )
    if diagnostic := host_difference(gathered, help_text):
        raise Refusal(diagnostic)
    return gathered[0][1]


def check_on_hosts(check: Callable[[], None]) -> None:
    """Run a check on the first rank of each host. Raises the first host's Refusal on every rank.
    Collective."""

    def refused() -> Refusal | None:
        try:
            check()
        except Refusal as problem:
            return problem
        return None

    for host, problem in _gather(refused):
        if problem is not None:
            raise Refusal(
                *(replace(d, message=f"host {host}: {d.message}") for d in problem.diagnostics)
            )


def host_difference(gathered: Sequence[tuple[str, Digests]], help_text: str) -> Diagnostic | None:
    """Return SW6011 where hosts have different files.

    gathered: (host, its digests), rank 0's host first. The majority's file is right; on a tie, the
    first host's.
    """
    differing_files: dict[str, list[str]] = {}
    agreeing = dict.fromkeys(host for host, _ in gathered)
    for name in dict.fromkeys(name for _, digests in gathered for name in digests):
        values = [digests.get(name, ABSENT) for _, digests in gathered]
        right, _ = Counter(values).most_common(1)[
            0
        ]  # the first that was met, where counts are equal
        for (host, _), value in zip(gathered, values, strict=True):
            if value != right:
                differing_files.setdefault(host, []).append(name)
                agreeing.pop(host, None)
    if not differing_files:
        return None
    told = "; ".join(
        f"host {host} has a different {', '.join(names)}"
        for host, names in list(differing_files.items())[:8]
    )
    more = f" (and {len(differing_files) - 8} more hosts)" if len(differing_files) > 8 else ""
    than = next(iter(agreeing), "the others")
    message = f"{told}{more} than {than}: the ranks would train different models or data"
    help = f"{help_text} `shardwright doctor` compares the folders. No step was trained."
    return found("SW6011", None, message, help)


def _edited_files(plan: Plan, found: Digests) -> tuple[Diagnostic, ...]:
    engine, errors = engine_of(plan), []
    for name, digest in plan.digests.items():
        if found.get(name, ABSENT) == digest:
            continue
        if name in engine.inputs:
            key = f"`extra:` takes {engine.title}'s keys"
        else:
            key = "its `model` section" if name.startswith(MODEL_DIRECTORY) else "`data.tokenizer`"
        is_missing = found[name] == ABSENT
        errors.append(
            Diagnostic(
                code="SW6010",
                message=f"{name} "
                + ("is missing" if is_missing else "is not what compile wrote: it was edited"),
                help=f"Edit the recipe: {key}, and compile again, so that the plan and its "
                "predictions include the change. (Compiling the same recipe again restores the "
                "file.)",
            )
        )
    return tuple(errors)


def _digest(path: Path) -> str:
    try:
        return checksum(path)
    except OSError:
        return ABSENT


def _gather(make: Callable[[], _Made]) -> list[tuple[str, _Made]]:
    """Return (host, what its first rank makes), in the order of the ranks."""
    from torch import distributed

    every: list[tuple[str, _Made] | None] = [None] * distributed.get_world_size()
    is_first_of_host = int(os.environ["LOCAL_RANK"]) == 0
    distributed.all_gather_object(
        every, (socket.gethostname(), make()) if is_first_of_host else None
    )
    return [one for one in every if one is not None]
