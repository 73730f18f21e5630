"""Tables: figures are never cut, whatever the terminal's width, and a pipe gets plain lines."""

from __future__ import annotations

import re
import sys

import pytest

from shardwright.cli.terminal import table_lines, title

HEADER = ("layout", "peak memory, GiB", "ms", "")
ROWS = (
    (
        "tensor=1 pipeline=4 data=4 activation_checkpointing=none",
        "70.60",
        "41,688.9",
        "data-parallel collectives",
    ),
    ("tensor=8 [bold]", "9.10", "1,141,688.9", ""),
)


def lines(monkeypatch: pytest.MonkeyPatch, width: int | None) -> list[str]:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: width is not None, raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
    return table_lines(HEADER, ROWS, text=(0, 3), bold=(0,), indent="  ")


def test_a_pipe_gets_aligned_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, None)
    assert len(found) == 3 and not any("\x1b" in line for line in found)
    assert found[1].index("70.60") + len("70.60") == found[2].index("9.10") + len("9.10")
    assert title("x") == "x"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_no_figure_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines(monkeypatch, width)]
    whole = "\n".join(found)
    assert all(figure in whole for row in ROWS for figure in row[1:3])
    assert "[bold]" in whole and "…" not in whole
    if width >= 80:
        assert max(map(len, found)) <= width


def test_a_heading_is_broken_between_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines(monkeypatch, 80)]
    assert any(
        line.split()[-1:] == ["memory,"] for line in found
    ) and "peak memory, GiB" not in "\n".join(found)
