"""run/rounds.jsonl: the outer steps that the store of several islands committed, a line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROUNDS = "run/rounds.jsonl"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """As they were written: `step`, `members`, `joined` (those that took a member's state after it), `store` (from 1:
    which start of the store wrote it), `attempt` (of that store, retries counted), `bytes` and `seconds`. A line that
    was cut short by the end of its store is left out. [] where nothing was written."""
    try:
        lines = (folder / ROUNDS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(dict(json.loads(line)))
        except ValueError:
            continue
    return found


def standing(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that the weights of today come from. Islands that resume from an older checkpoint make its later outer
    steps again: a line undoes the ones before it of the same step and of later ones."""
    found: list[dict[str, Any]] = []
    for line in rounds:
        found = [each for each in found if each["step"] < line["step"]]
        found.append(line)
    return found
