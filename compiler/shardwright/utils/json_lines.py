"""JSON Lines files: one object a line, appended while others read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO, TypedDict, TypeVar

import msgspec

from shardwright.diagnostics.file_errors import names_file
from shardwright.utils.file_io import open_regular_file, parse_strict_json, write_atomically
from shardwright.utils.json_values import JsonObject, JsonValue, strict_json

Row = TypeVar("Row")
# Numbers of a line. The bounds are far from what a run writes, and keep sums, squares and texts of
# them within what Python's floats hold.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Figure = Annotated[float, msgspec.Meta(ge=-1e60, le=1e60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
PositiveSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=1e12)]


class StepLine(TypedDict):
    """Types the keys of a line that readers use. More keys may stand in it, of any type."""

    step: Count


def read_json_lines(
    path: Path,
    kind: type[Any] = dict,
    *,
    containing: str = "",
    newest_first: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines that contain a text; nothing where the file cannot be read.

    kind: a TypedDict. A line whose keys do not have its types is left out, and so is one that is
    cut short, as the last one of a process that was killed.
    """
    try:
        with open_regular_file(path) as file:
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines) if newest_first else lines:
        if containing.encode() not in line:
            continue
        try:
            row = parse_strict_json(line)
            msgspec.convert(row, kind)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def rows_by_step(
    path: Path,
    row_of: Callable[[dict[str, Any]], Row],
    kind: type[Any] = StepLine,
    *,
    containing: str = "",
) -> dict[int, Row]:
    """Return the newest row of each step, in the steps' order.

    row_of: makes a row of a line's object; a line that it cannot take, or that is not of the
    `kind`, is left out.
    """
    rows: dict[int, Row] = {}
    for line in read_json_lines(path, kind, containing=containing):
        try:
            rows[int(line["step"])] = row_of(line)
        except (ValueError, KeyError, TypeError):
            continue
    return dict(sorted(rows.items()))


def append_line(path: Path, row: JsonObject) -> None:
    """Append a line; return once the disk has it. A line that a killed process left half written is
    closed first. Raises OSError, which names `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is a folder, a pipe or a device, not a file", str(path))
    with names_file(path), path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(begin + strict_json(row).encode("utf-8") + b"\n")
        file.flush()
        os.fsync(file.fileno())


class JsonLinesWriter:
    """Appends a line at once for each call. The file is cut back to where an attempt resumes."""

    def __init__(self, path: Path, attempt: int, resumed_step: int) -> None:
        """attempt: a field of every line. resumed_step: the last step whose lines are kept."""
        self._attempt = attempt
        kept = [
            json.dumps(line) + "\n"
            for line in (read_json_lines(path, StepLine) if resumed_step else ())
            if line["step"] <= resumed_step
        ]
        write_atomically(path, "".join(kept))
        self._path = path
        self._file: TextIO = path.open("a", buffering=1)

    def write_line(self, **fields: JsonValue) -> str:
        """Return the line. A number that is not finite is null there. Raises OSError, which names
        the file."""
        text = strict_json({**fields, "attempt": self._attempt})
        with names_file(self._path):
            self._file.write(text + "\n")
        return text
