"""What every command shares: where diagnostics are printed, and whether in colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # `shardwright --help` shall not pay for them
    from shardwright.diagnostics import Diagnostic, Refusal, Source


def use_color(stream: TextIO) -> bool:
    """On a terminal only, and never where NO_COLOR is set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def print_diagnostics(
    diagnostics: Iterable[Diagnostic], source: Source | None, stream: TextIO | None = None
) -> None:
    """To stderr unless told otherwise."""
    from shardwright.diagnostics.diagnostic_rendering import render_diagnostics

    stream = stream or sys.stderr
    text = render_diagnostics(diagnostics, source, color=use_color(stream))
    if text:
        stream.write(text)
        stream.flush()


def print_refusal(refusal: Refusal, source: Source | None = None) -> None:
    print_diagnostics(refusal.diagnostics, refusal.source or source)


def shell_quoted(path: str) -> str:
    """`path` as one word to paste into a shell: nothing in it is run, and nothing reaches the
    terminal raw."""
    import shlex

    path = f"./{path}" if path.startswith("-") else path
    if path.isprintable():
        return shlex.quote(path)
    escaped = path.replace("\\", "\\\\").replace("'", "\\'").encode("utf-8", "surrogateescape")
    return "$'" + "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in escaped) + "'"


def error(message: str) -> None:
    """One line without a code: usage, not a recipe. `message` may hold the user's own text."""
    from shardwright.diagnostics.diagnostic_rendering import escape_control_characters

    print(f"shardwright: {escape_control_characters(message)}", file=sys.stderr)
