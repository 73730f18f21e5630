"""Tables: aligned text where it is piped, drawn on a terminal. The same cells in both."""

from __future__ import annotations

import sys
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def table_lines(
    header: Sequence[str], rows: Rows, *, text: Sequence[int] = (), indent: str = "", bold: Sequence[int] = ()
) -> list[str]:
    """Lines without a line end. text: columns that stand on the left; the others are numbers, and stand on the right.
    bold: rows that a terminal shows in green."""
    if sys.stdout.isatty():
        return [indent + line for line in _drawn(header, rows, text, bold)]
    every = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, range(len(row)), strict=True)
        return (indent + "  ".join(cell.ljust(w) if i in text else cell.rjust(w) for cell, w, i in cells)).rstrip()

    return [line(row) for row in every]


def _drawn(header: Sequence[str], rows: Rows, text: Sequence[int], bold: Sequence[int]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for i, name in enumerate(header):
        drawn.add_column(name, justify="left" if i in text else "right", no_wrap=name != "")
    for place, row in enumerate(rows):
        # Text: a cell such as [0, 4) is no markup.
        drawn.add_row(*(Text(cell) for cell in row), style="bold green" if place in bold else None)
    console = Console(soft_wrap=False)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n").splitlines()


def title(words: str) -> str:
    """A heading: bold on a terminal."""
    from shardwright.cli.console import use_color

    return f"\033[1m{words}\033[0m" if use_color(sys.stdout) else words
