"""The record of outer steps, over several starts of the store."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.watch.rounds import ROUNDS, read_rounds, standing


def test_later_starts_undo_what_they_make_again(tmp_path: Path) -> None:
    assert read_rounds(tmp_path) == []
    lines = [
        {"step": 4, "members": [0, 1], "store": 1},
        {"step": 8, "members": [0], "store": 1},
        {"step": 12, "members": [0, 1], "store": 1},
        {"step": 8, "members": [0, 1], "store": 2},  # both resumed from step 4
        {"step": 8, "members": [1], "store": 3},  # the commit of store 2 was applied by nobody
    ]
    path = tmp_path / ROUNDS
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "mem\n')
    assert read_rounds(tmp_path) == lines
    assert standing(lines) == [lines[0], lines[4]]
    assert standing(lines[:3]) == lines[:3]
