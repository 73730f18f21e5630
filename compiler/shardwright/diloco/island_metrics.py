"""The training of several islands as one: their metrics put together, and who took part in its
outer steps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardwright.monitor.attempt_records import METRICS_FILE
from shardwright.monitor.run_files import MetricsLine, number
from shardwright.utils.json_lines import Count, Seconds, StepLine, read_json_lines, rows_by_step

# run/rounds.jsonl: the outer steps that the store of several islands committed, a line each.


ROUNDS_FILE = "run/rounds.jsonl"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the committed outer steps as they were written; [] where there are none.

    Keys: `step`, `members`, `joined` (islands that took a member's state after it), `store` (from
    1: the start of the store that wrote it), `attempt` (of that store, retries counted), `bytes`
    and `seconds`. A line that was cut short by the end of its store is left out.
    """
    return list(read_json_lines(folder / ROUNDS_FILE))


class RoundLog:
    """run/rounds.jsonl, open for one start of the store. Every method raises OSError where the disk
    does."""

    def __init__(self, folder: Path) -> None:
        path = folder / ROUNDS_FILE
        starts = [line.get("store") for line in read_rounds(folder)]
        self.store = 1 + max((number for number in starts if isinstance(number, int)), default=0)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._file).st_size
        if (
            size and os.pread(self._file, 1, size - 1) != b"\n"
        ):  # a store that was killed may have left half a line
            self._append(b"\n")

    def write(self, line: dict[str, Any]) -> None:
        """Returns once the disk has the line. What an error leaves of it is taken back."""
        self._append(json.dumps({**line, "store": self.store}).encode("utf-8") + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _append(self, text: bytes) -> None:
        before, rest = os.fstat(self._file).st_size, memoryview(text)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise


class RoundLine(StepLine):
    """A line of run/rounds.jsonl."""

    members: list[Count]
    joined: list[Count]
    seconds: Seconds


def effective_rounds(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds that the current weights come from.

    Islands that resume from an older checkpoint repeat its later outer steps: a line undoes the
    earlier ones of the same step and of later steps. A line that is not a RoundLine is left out.
    """
    found: list[dict[str, Any]] = []
    for line in rounds:
        try:
            msgspec.convert(line, RoundLine)
        except msgspec.ValidationError:
            continue
        found = [each for each in found if each["step"] < line["step"]]
        found.append(line)
    return found


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
    rows = {
        island: rows_by_step(
            folder / METRICS_FILE, lambda line: (number(line["loss"]), line["tokens"]), MetricsLine
        )
        for island, folder in folders.items()
    }
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
