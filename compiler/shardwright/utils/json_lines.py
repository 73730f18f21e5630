"""JSON Lines files: one object a line, appended while others read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from shardwright.utils.file_io import write_atomically
from shardwright.utils.json_values import JsonValue, strict_json

Row = TypeVar("Row")


def read_json_lines(
    path: Path, *, containing: str = "", newest_first: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines that contain a text; nothing where the file cannot be read.

    A line that is cut short, as the last one of a process that was killed, is left out.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in reversed(lines) if newest_first else lines:
        if containing.encode() not in line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def rows_by_step(
    path: Path, row_of: Callable[[dict[str, Any]], Row], *, containing: str = ""
) -> dict[int, Row]:
    """Return the newest row of each step, in the steps' order.

    row_of: makes a row of a line's object; a line that it cannot take, or without a step, is left
    out.
    """
    rows: dict[int, Row] = {}
    for line in read_json_lines(path, containing=containing):
        try:
            rows[int(line["step"])] = row_of(line)
        except (ValueError, KeyError, TypeError):
            continue
    return dict(sorted(rows.items()))


class JsonLinesWriter:
    """Appends a line at once for each call. The file is cut back to where an attempt resumes."""

    def __init__(self, path: Path, attempt: int, resumed_step: int) -> None:
        """attempt: a field of every line. resumed_step: the last step whose lines are kept."""
        self._attempt = attempt
        kept = [
            json.dumps(line) + "\n"
            for line in (read_json_lines(path) if resumed_step else ())
            if isinstance(step := line.get("step"), int) and step <= resumed_step
        ]
        write_atomically(path, "".join(kept))
        self._file: TextIO = path.open("a", buffering=1)

    def write_line(self, **fields: JsonValue) -> str:
        """Return the line. A number that is not finite is null there."""
        text = strict_json({**fields, "attempt": self._attempt})
        self._file.write(text + "\n")
        return text
