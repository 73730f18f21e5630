"""A recipe that is compiled anew with more islands, fewer, or none: what its run goes on from
(docs/islands.md)."""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoint.checkpoint_manifest import MANIFEST, damage, read_manifest
from shardwright.checkpoint.step_folders import published_steps, step_of
from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor.run_files import ATTEMPT_FILE
from shardwright.plan.plan import Plan

OUTER_MOMENTUM = "outer_momentum"
_OUTER, _ISLAND = "outer_", "island-"


def check_other_island_counts(plan: Plan, folder: Path, root: Path, own: int) -> None:
    """own: the newest step that this run could go on from. Raises Refusal, SW6218, where another
    number of islands has trained further in the same folder since this run last began. A new island
    beside others that have trained takes a member's state: no refusal."""
    directory = Path(plan.checkpoint.directory)
    is_apart = directory.is_absolute()
    parent = (
        (root if is_apart else folder)
        if plan.outer is None
        else (root.parent if is_apart else folder.parent)
    )
    of_islands = [each if is_apart else each / directory for each in _islands(parent)]
    places = of_islands if plan.outer is None else [parent if is_apart else parent / directory]
    newest = [found for place in places if (found := _newest(place)) is not None]
    if not newest:
        _check_none_between(places, own)
        return
    path = max(newest, key=step_of)  # of the lowest island that has it
    if plan.outer is not None:
        own = max(
            [
                own,
                *(step_of(found) for place in of_islands if (found := _newest(place)) is not None),
            ]
        )
    if step_of(path) > own and _written(path / MANIFEST) > _written(folder / ATTEMPT_FILE):
        who, where = (
            ("several islands", "") if plan.outer is None else ("one world", ", on each island")
        )
        raise refusal(
            "SW6218",
            f"{str(path)!r} was written by {who}, and is newer than what is compiled now has",
            (
                f"`--resume {path}` goes on from its weights and Adam's moments{where}. `--resume "
                "never` starts anew."
            ),
        )


def _check_none_between(places: list[Path], own: int) -> None:
    """With overlap every checkpoint but that of the last step is one from between two outer
    steps."""
    steps = [path for place in places for step, path in published_steps(place) if step > own]
    if steps:
        raise _unfinished_round_refusal(max(steps, key=step_of), " `--resume never` starts anew.")


def _unfinished_round_refusal(path: Path, more: str = "") -> Refusal:
    return refusal(
        "SW6218",
        (
            f"{str(path)!r} was written between two outer steps: it has the weights of one "
            "island alone"
        ),
        "Go on from one after an outer step. Islands make one when they are compiled again with "
        f"their number and `overlap_steps: 0`, and run on to checkpoint.every_steps.{more}",
    )


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def check_round_complete(plan: Plan, checkpoint: Path) -> None:
    """Raises Refusal, SW6218, for one world that is to go on from the middle of a round of islands:
    the others' steps would be lost in silence."""
    if plan.outer is None and not _is_after_outer_step(checkpoint):
        raise _unfinished_round_refusal(checkpoint)


def _islands(parent: Path) -> list[Path]:
    """Their folders, by their numbers."""
    found = [p for p in parent.glob(f"{_ISLAND}*") if p.name.removeprefix(_ISLAND).isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(_ISLAND)))


def _newest(place: Path) -> Path | None:
    """The newest whole checkpoint there that closes a round."""
    for _, path in reversed(published_steps(place)):
        if damage(path, contents=False) is None and _is_after_outer_step(path):
            return path
    return None


def _is_after_outer_step(checkpoint: Path) -> bool:
    """Whether it has no state of an outer step that is still to come."""
    try:
        tensors = read_manifest(checkpoint).tensors.values()
    except (OSError, ValueError):
        return True  # what is wrong with it is told elsewhere
    states = {state for tensor in tensors for state in tensor.states}
    return not any(state.startswith(_OUTER) and state != OUTER_MOMENTUM for state in states)
