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


def print_diagnostics(diagnostics: Iterable[Diagnostic], source: Source | None, stream: TextIO | None = None) -> None:
    """To stderr unless told otherwise."""
    from shardwright.diagnostics.render import render

    stream = stream or sys.stderr
    text = render(diagnostics, source, color=use_color(stream))
    if text:
        stream.write(text)
        stream.flush()


def print_refusal(refusal: Refusal, source: Source | None = None) -> None:
    print_diagnostics(refusal.diagnostics, refusal.source or source)


def error(message: str) -> None:
    """One line without a code: usage, not a recipe. `message` may hold the user's own text."""
    from shardwright.diagnostics.render import visible

    print(f"shardwright: {visible(message)}", file=sys.stderr)
