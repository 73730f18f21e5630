"""run/rounds.jsonl: the outer steps that the store of several islands committed, a line each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROUNDS_FILE = "run/rounds.jsonl"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """As they were written: `step`, `members`, `joined` (those that took a member's state after
    it), `store` (from 1: which start of the store wrote it), `attempt` (of that store, retries
    counted), `bytes` and `seconds`. A line that was cut short by the end of its store is left out.
    [] where nothing was written."""
    try:
        lines = (folder / ROUNDS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


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


def effective_rounds(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that the weights of today come from. Islands that resume from an older checkpoint make
    its later outer steps again: a line undoes the ones before it of the same step and of later
    ones."""
    found: list[dict[str, Any]] = []
    for line in rounds:
        found = [each for each in found if each["step"] < line["step"]]
        found.append(line)
    return found
