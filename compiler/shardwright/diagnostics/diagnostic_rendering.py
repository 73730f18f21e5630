"""Renders diagnostics as text for people (the recipe's line with a caret under the value) and as
plain JSON for programs.

Nothing of a recipe reaches the terminal raw: control characters, escapes and direction marks become
visible signs, and secrets asterisks.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable

from shardwright.diagnostics.diagnostic import Diagnostic, Location, Severity, Source
from shardwright.diagnostics.secret_values import masked_line

WIDEST = 100
"""Columns of a source line that are shown; longer lines are cut around the caret."""
TAB = "    "

_RESET, _BOLD, _RED, _YELLOW, _BLUE, _CYAN = (
    "\033[0m",
    "\033[1m",
    "\033[1;31m",
    "\033[1;33m",
    "\033[1;34m",
    "\033[1;36m",
)
_TONES: dict[Severity, str] = {"error": _RED, "warning": _YELLOW, "note": _BLUE}
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
# The key is at fault, not its value: unknown, twice in a mapping, a merge key, not text.
_KEY_CODES = frozenset({"SW1006", "SW1007", "SW1015", "SW1101", "SW2005", "SW5210"})

Paint = Callable[[str, str], str]
"""(escape sequence, text) -> text"""


def render_diagnostics(
    diagnostics: Iterable[Diagnostic], source: Source | None, *, color: bool
) -> str:
    """Return a block per diagnostic, with a blank line between two; "" without diagnostics."""

    def paint(tone: str, text: str) -> str:
        return f"{tone}{text}{_RESET}" if color else text

    return "\n".join(_block(diagnostic, source, paint) for diagnostic in diagnostics)


def location_of(diagnostic: Diagnostic, source: Source | None) -> Location | None:
    """Return the place to show: the diagnostic's own, or its key's, or that of the nearest section
    that the recipe has."""
    if diagnostic.location is not None or source is None:
        return diagnostic.location
    key = diagnostic.key
    if key is None:
        return Location(file=source.file, line=0, column=0) if source.file else None
    tables = (source.locations, source.key_locations)
    for table in reversed(tables) if diagnostic.code in _KEY_CODES else tables:
        if key in table:
            return table[key]
    while key:
        key = key[:-1]
        # The section's own key: its value may be lines away.
        for table in reversed(tables):
            if key in table:
                return table[key]
    return Location(file=source.file, line=0, column=0) if source.file else None


def diagnostic_to_json(
    diagnostic: Diagnostic, source: Source | None = None
) -> dict[str, str | int | None]:
    """Return a diagnostic as JSON. file, line and column are None where it has no place; line and
    column 0 mean the file as a whole."""
    place = location_of(diagnostic, source)
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "help": diagnostic.help,
        "file": place.file if place else None,
        "line": place.line if place else None,
        "column": place.column if place else None,
    }


def escape_control_characters(text: str) -> str:
    """Return text that cannot move the cursor, switch colours or reorder its neighbours."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    point = ord(character)
    if point < 0x20:
        return chr(0x2400 + point)  # the Unicode picture of the control character
    if point == 0x7F:
        return "\u2421"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return "\ufffd"
    return character


def width(text: str) -> int:
    """Count terminal columns: wide characters take two, combining ones none."""
    return len(text) if text.isascii() else sum(_width(character) for character in text)


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) == "Me":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _block(diagnostic: Diagnostic, source: Source | None, paint: Paint) -> str:
    tone = _TONES[diagnostic.severity]
    severity = paint(tone, f"{diagnostic.severity}[{diagnostic.code}]")
    head = severity + paint(_BOLD, ": " + escape_control_characters(diagnostic.message))
    lines = [head, *_excerpt(location_of(diagnostic, source), source, tone, paint)]
    help = diagnostic.help
    for index, line in enumerate(help.splitlines()):
        lines.append(
            f"  {paint(_CYAN, '= help:' if index == 0 else '       ')} "
            f"{escape_control_characters(line)}"
        )
    if diagnostic.valid and not any(value.rpartition(".")[2] in help for value in diagnostic.valid):
        lines.append(
            f"  {paint(_CYAN, '= valid:')} {escape_control_characters(', '.join(diagnostic.valid))}"
        )
    return "".join(f"{line}\n" for line in lines)


def _excerpt(place: Location | None, source: Source | None, tone: str, paint: Paint) -> list[str]:
    if place is None:
        return []
    arrow = paint(_BLUE, "-->")
    if place.line < 1:
        return [f" {arrow} {escape_control_characters(place.file)}"]
    number = str(place.line)
    margin = " " * len(number)
    found = [f"{margin}{arrow} {escape_control_characters(place.file)}:{place.line}:{place.column}"]
    text = source.texts.get(place.file) if source else None
    lines = () if text is None else _lines(text)
    if place.line <= len(lines):
        shown, indent, run = _cut(masked_line(lines[place.line - 1]), place)
        bar = paint(_BLUE, "|")
        found += [
            f"{margin} {bar}",
            f"{paint(_BLUE, number)} {bar} {shown}".rstrip(),
            f"{margin} {bar} {' ' * indent}{paint(tone, '^' * run)}",
        ]
    return found


@functools.lru_cache(maxsize=8)
def _lines(text: str) -> tuple[str, ...]:
    """Split a text into lines, once for all findings of a file."""
    return tuple(_LINE_BREAK.split(text))


def _cut(line: str, place: Location) -> tuple[str, int, int]:
    """Return (text to show, columns before the caret, carets), at most WIDEST columns wide."""
    start = max(0, place.column - 1)
    end, far = (
        start + place.length,
        4 * WIDEST,
    )  # no more than this can be shown, however long the line is
    before, marked = (
        _expand(line[max(0, start - far) : start]),
        _expand(line[start : min(end, start + far)]),
    )
    after = _expand(line[end : end + far])
    if width(before + marked + after) > WIDEST:
        before = _shorten(before, WIDEST // 3, keep_end=True)
        marked = _shorten(marked, WIDEST // 2, keep_end=False)
        after = _shorten(after, max(4, WIDEST - width(before) - width(marked)), keep_end=False)
    return before + marked + after, width(before), max(1, width(marked))


def _expand(text: str) -> str:
    return escape_control_characters(text.replace("\t", TAB))


def _shorten(text: str, columns: int, *, keep_end: bool) -> str:
    """Cut to `columns`, with "..." where something is missing."""
    if width(text) <= columns:
        return text
    room, kept = columns - 3, ""
    for character in reversed(text) if keep_end else text:
        room -= _width(character)
        if room < 0:
            break
        kept = character + kept if keep_end else kept + character
    return f"...{kept}" if keep_end else f"{kept}..."
