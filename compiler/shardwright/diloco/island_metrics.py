"""The training of several islands as one: their metrics put together, and who took part in its
outer steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.monitor.run_files import number


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep:
    """islands: whose rows count. loss: their mean, weighted by `tokens`; tokens: of all of them.
    NaN where one is."""

    step: int
    islands: tuple[int, ...]
    loss: float
    tokens: int


def merged_steps(
    folders: Mapping[int, Path], rounds: Sequence[Mapping[str, Any]], every_steps: int
) -> list[MergedStep]:
    """folders: of the islands that are here. rounds: those that stand. Where it is known who took
    part in the outer step that closed a step, the others' rows are left out: nothing of the result
    was trained on them. Without a round every island that has made the step counts."""
    members = {int(each["step"]): set(each["members"]) for each in rounds}
    rows = {island: _rows(folder / "run" / "metrics.jsonl") for island, folder in folders.items()}
    found = []
    for step in sorted({step for each in rows.values() for step in each}):
        taking = members.get(-(-step // every_steps) * every_steps, set(rows))
        here = [island for island in sorted(rows) if island in taking and step in rows[island]]
        told = [rows[island][step] for island in here]
        tokens = sum(count for _, count in told)
        if tokens:
            loss = sum(loss * count for loss, count in told) / tokens
            found.append(MergedStep(step=step, islands=tuple(here), loss=loss, tokens=tokens))
    return found


def missing(count: int, rounds: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """rounds: those that stand. Island -> outer steps in a row, up to the last one, that were made
    without it."""
    found = {}
    for island in range(count):
        without = 0
        for each in reversed(rounds):
            if island in each["members"] or island in each["joined"]:
                break
            without += 1
        if without:
            found[island] = without
    return found


def _rows(path: Path) -> dict[int, tuple[float, int]]:
    """Step -> (loss, tokens), the newest of each. A half-written line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    found = {}
    for line in lines:
        try:
            row = json.loads(line)
            found[int(row["step"])] = (number(row["loss"]), int(row["tokens"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found
