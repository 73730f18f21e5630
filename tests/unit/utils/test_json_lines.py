"""Lines that others append are read whatever is half written; a resumed attempt cuts them back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwright.diagnostics.file_errors import file_error_refusal
from shardwright.utils.json_lines import (
    JsonLinesWriter,
    append_line,
    read_json_lines,
    rows_by_step,
)

BROKEN = [b'{"step": 9, "lo', b"[1]", b"7", b"\xff{}", b"", b"[" * 100_000]


def test_what_is_no_object_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_json_lines(path)) == []
    path.write_bytes(b"\n".join([b'{"step": 1}', *BROKEN[:-1], b'{"step": 2}', BROKEN[-1]]))
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}]
    assert next(read_json_lines(path, newest_first=True)) == {"step": 2}
    assert list(read_json_lines(path, containing='p": 1')) == [{"step": 1}]


def test_the_newest_row_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    rows = [{"step": 2, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 3}, {"step": 3}, {"x": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rows_by_step(path, lambda row: int(row["x"]))
    assert list(found.items()) == [(1, 2), (2, 3)]


def test_an_attempt_keeps_the_lines_up_to_where_it_resumes(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first = JsonLinesWriter(path, 1, 0)
    for step in (1, 2, 3):
        first.write_line(step=step, loss=float("nan"))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    second = JsonLinesWriter(path, 2, 2)
    second.write_line(step=3, loss=1.5)
    lines = path.read_text().splitlines()
    lost = '{"step": %d, "loss": null, "attempt": 1, "finite": false}'
    assert lines == [lost % 1, lost % 2, '{"step": 3, "loss": 1.5, "attempt": 2}']
    JsonLinesWriter(path, 3, 0)
    assert path.read_bytes() == b""


def test_nothing_is_appended_to_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="a pipe") as failed:
        append_line(path, {"step": 1})
    assert "SW6323" in str(file_error_refusal(failed.value))
