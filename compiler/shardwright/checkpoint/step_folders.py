"""Folders of checkpoints: what they are called, and which others lie beside them. No torch here.

`step-%08d` is a whole one, published by one rename; everything else under the root starts with a
dot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_ASIDE = re.compile(r"\.before-attempt-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(partial|removed|fetched)")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a published folder's name, None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_of(checkpoint: Path) -> int:
    """Of a published folder's name; 0 for another."""
    return parse_step(checkpoint.name) or 0


def published_steps(root: Path) -> list[tuple[int, Path]]:
    """Step folders under `root`, oldest first: a rename publishes one, so that only later damage
    makes one bad."""
    if not root.is_dir():
        return []
    named = ((parse_step(path.name), path) for path in root.iterdir())
    return sorted((step, path) for step, path in named if step is not None and path.is_dir())


def superseded_checkpoints(
    names: Sequence[str], keep: int, is_finite: Callable[[str], bool]
) -> list[str]:
    """Of checkpoints, oldest first, those that `keep` leaves no room for: never the newest with a
    finite loss."""
    kept, older = names[-keep:], names[:-keep]
    if any(is_finite(name) for name in reversed(kept)):
        return list(older)
    spared = next((name for name in reversed(older) if is_finite(name)), None)
    return [name for name in older if name != spared]


def publish(partial: Path, root: Path, step: int) -> None:
    """By one rename. What has the name already, whoever put it there, is moved aside and not
    lost."""
    target = root / step_name(step)
    if target.exists():
        _move_aside(root, [target], 0)
    os.rename(partial, target)


def rejected_faster_layouts(root: Path, attempt: int, newer_than: int) -> None:
    """An attempt that goes on from an earlier step (or from none) keeps the later checkpoints out
    of its way, and loses none: they move to a dot folder."""
    later = [path for step, path in published_steps(root) if step > newer_than]
    if later:
        _move_aside(root, later, attempt)


def _move_aside(root: Path, steps: list[Path], attempt: int) -> None:
    """attempt: its number is taken, where no folder has it or a later one (run/ may have been
    deleted)."""
    number = max([attempt, *(1 + taken for taken, _ in _moved_aside_folders(root))])
    aside = root / f".before-attempt-{number}"
    aside.mkdir(parents=True)
    for path in steps:
        path.rename(aside / path.name)


def _moved_aside_folders(root: Path) -> list[tuple[int, Path]]:
    """Oldest first."""
    matches = ((_ASIDE.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def prune_moved_aside(root: Path, step: int) -> None:
    """After the checkpoint of `step`: the newest folder that was moved aside stays, others go once
    the run has come past all their steps."""
    for _, aside in _moved_aside_folders(root)[:-1]:
        if all(other <= step for other, _ in published_steps(aside)):
            shutil.rmtree(aside, ignore_errors=True)


def remove_step(path: Path) -> None:
    """A half-deleted checkpoint must not look like one."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(
        FileNotFoundError
    ):  # another host that shares the file system was first
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear_unfinished(root: Path) -> None:
    """What a killed attempt was writing, fetching or removing."""
    for path in root.iterdir() if root.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
