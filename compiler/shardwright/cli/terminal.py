"""Print diagnostics, rows and tables on the terminal, in colour where it takes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from shardwright.diagnostics import Diagnostic, Refusal, Source


def use_color(stream: TextIO) -> bool:
    """Return whether to colour: on a terminal, and never with NO_COLOR (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def terminal_width() -> int:
    """Return the columns of standard output: COLUMNS, else the terminal's, else 80."""
    import shutil

    is_set = os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if is_set or sys.stdout.isatty() else 80


def print_diagnostics(
    diagnostics: Iterable[Diagnostic], source: Source | None, stream: TextIO | None = None
) -> None:
    """Print to stderr unless told otherwise."""
    from shardwright.diagnostics.diagnostic_rendering import render_diagnostics

    stream = stream or sys.stderr
    text = render_diagnostics(diagnostics, source, color=use_color(stream))
    if text:
        stream.write(text)
        stream.flush()


def print_refusal(refusal: Refusal, source: Source | None = None) -> None:
    print_diagnostics(refusal.diagnostics, refusal.source or source)


def shell_quoted(path: str) -> str:
    """Quote `path` as one word to paste into a shell: nothing in it is run, and nothing reaches the
    terminal raw."""
    import shlex

    path = f"./{path}" if path.startswith("-") else path
    if path.isprintable():
        return shlex.quote(path)
    escaped = path.replace("\\", "\\\\").replace("'", "\\'").encode("utf-8", "surrogateescape")
    return "$'" + "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in escaped) + "'"


def error(message: str) -> None:
    """Print one line without a code, about usage. `message` may hold the user's own text."""
    from shardwright.diagnostics.diagnostic_rendering import escape_control_characters

    print(f"shardwright: {escape_control_characters(message)}", file=sys.stderr)


def labelled_lines(
    rows: Iterable[tuple[str, str]], width: int | None = None, indent: str = ""
) -> list[str]:
    """Return a line for each (name, text), the texts below each other. width: columns of the name
    and the space behind it; by default two more than the longest name."""
    rows = list(rows)
    width = width or max(len(name) for name, _ in rows) + 2
    return [f"{indent}{name:<{width}}{text}" for name, text in rows]


def table_width(header: Sequence[str], rows: Rows) -> int:
    """Return the columns that a table's cells take side by side."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


# Tables: aligned text where it is piped, drawn on a terminal. The same cells in both.


Rows = Sequence[Sequence[str]]
NARROWEST_TEXT = 12
COLUMN_GAP = 2  # columns between two cells, drawn or not


def table_lines(
    header: Sequence[str],
    rows: Rows,
    *,
    text: Sequence[int] = (),
    indent: str = "",
    bold: Sequence[int] = (),
) -> list[str]:
    """Lines without a line end. text: columns that stand on the left; the others are numbers, and
    stand on the right. bold: rows that a terminal shows in green."""
    if sys.stdout.isatty() and (drawn := _drawn(header, rows, text, bold, len(indent))):
        return [indent + line for line in drawn]
    every = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, range(len(row)), strict=True)
        return (
            indent
            + "  ".join(cell.ljust(w) if i in text else cell.rjust(w) for cell, w, i in cells)
        ).rstrip()

    return [line(row) for row in every]


def _drawn(
    header: Sequence[str], rows: Rows, text: Sequence[int], bold: Sequence[int], indent: int
) -> list[str]:
    """Headings and text are folded where the terminal is narrow, figures never: where they do not
    fit, nothing is drawn and the terminal breaks the plain lines."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(
        soft_wrap=False,
        color_system="auto" if use_color(sys.stdout) else None,
        width=terminal_width(),
    )
    widths = _widths(header, rows, text, console.width - indent - COLUMN_GAP * (len(header) - 1))
    if widths is None:
        return []
    # The gap: a cell's padding and the box's own column between two cells.
    drawn = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        padding=(0, COLUMN_GAP - 1, 0, 0),
    )
    for i, name in enumerate(header):
        drawn.add_column(
            name, justify="left" if i in text else "right", width=widths[i], overflow="fold"
        )
    for place, row in enumerate(rows):
        # Text: a cell such as [0, 4) is no markup.
        drawn.add_row(*(Text(cell) for cell in row), style="bold green" if place in bold else None)
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def _widths(
    header: Sequence[str], rows: Rows, text: Sequence[int], available: int
) -> list[int] | None:
    """Return each column's width. Headings break between words; text columns share what the figures
    leave. None where not even the narrowest text has room."""
    natural = [max((len(row[i]) for row in rows), default=0) for i in range(len(header))]
    words = [max(map(len, name.split()), default=0) for name in header]
    widths = [max(cell, word) for cell, word in zip(natural, words, strict=True)]
    left = available - sum(width for i, width in enumerate(widths) if i not in text)
    waiting = sorted(text, key=lambda i: widths[i])
    for place, i in enumerate(waiting):
        share = left // (len(waiting) - place)
        if share < min(widths[i], NARROWEST_TEXT):
            return None
        widths[i] = min(widths[i], share)
        left -= widths[i]
    return widths if left >= 0 else None


def title(words: str) -> str:
    """Return a heading, bold on a terminal."""

    return f"\033[1m{words}\033[0m" if use_color(sys.stdout) else words
