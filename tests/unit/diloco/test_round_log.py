"""The record of outer steps, over several starts of the store."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from shardwright.diloco.island_metrics import ROUNDS_FILE, RoundLog, effective_rounds, read_rounds


def test_later_starts_undo_what_they_make_again(tmp_path: Path) -> None:
    assert read_rounds(tmp_path) == []
    lines = [
        {"step": 4, "members": [0, 1], "store": 1},
        {"step": 8, "members": [0], "store": 1},
        {"step": 12, "members": [0, 1], "store": 1},
        {"step": 8, "members": [0, 1], "store": 2},  # both resumed from step 4
        {"step": 8, "members": [1], "store": 3},  # the commit of store 2 was applied by nobody
    ]
    lines = [{**line, "joined": [], "seconds": 0.2} for line in lines]
    path = tmp_path / ROUNDS_FILE
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "mem\n')
    assert read_rounds(tmp_path) == lines
    assert effective_rounds(lines) == [lines[0], lines[4]]
    assert effective_rounds(lines[:3]) == lines[:3]


def test_a_line_that_a_full_disk_cuts_short_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / ROUNDS_FILE).write_text(
        '{"step": 2, "store": "x"}\n[1]\n{"step": 4, "store": 2}\n{"step": 8, "st'
    )
    record = RoundLog(tmp_path)
    assert record.store == 3
    record.write({"step": 12})
    write = os.write

    def full(file: int, text: memoryview) -> int:
        if len(text) > 8:
            return write(file, text[:8])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (tmp_path / ROUNDS_FILE).read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "write", full)
        record.write({"step": 8})
    assert (tmp_path / ROUNDS_FILE).read_bytes() == before
    record.write({"step": 16})
    record.close()
    assert [each["step"] for each in read_rounds(tmp_path)] == [2, 4, 12, 16]
    assert read_rounds(tmp_path)[-1]["store"] == 3
