r"""A JSON document -> events. The standard library judges the text; this only finds where things
stand in it.

YAML readers stumble over some JSON (tabs, \u pairs, keys of more than 1,024 characters), hence a
reader of its own.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.diagnostics import Location

# What both readers (YAML and JSON) report: a flat stream of events, so that nesting costs no
# recursion.


LINE_BREAK = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseEvent:
    """start, end: offsets into the text. text: a scalar's value, or an alias's name. plain:
    unquoted."""

    kind: Literal["map", "list", "end", "scalar", "alias", "document"]
    start: int
    end: int
    text: str = ""
    plain: bool = False
    flow: bool = False
    anchor: str | None = None
    tag: str | None = None


class LineOffsets:
    """Offsets -> places. `text` is the whole text as it will be shown; `offset` is where the part
    being read begins."""

    def __init__(self, file: str, text: str, offset: int = 0) -> None:
        self.file = file
        self._offset = offset
        self._starts = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
        self._ends = [*(match.start() for match in LINE_BREAK.finditer(text)), len(text)]

    def at(self, start: int, end: int) -> Location:
        """The place of text[start:end], cut at the end of its first line."""
        start, end = start + self._offset, end + self._offset
        line = bisect.bisect_right(self._starts, start) - 1
        length = max(1, min(end, self._ends[line]) - start)
        return Location(
            file=self.file, line=line + 1, column=start - self._starts[line] + 1, length=length
        )


class ParseError(Exception):
    """Raised by a reader at the first place where the text cannot be read on."""

    def __init__(self, message: str, start: int, help: str = "", code: str = "SW1005") -> None:
        super().__init__(message)
        self.message, self.start, self.help, self.code = message, start, help, code


_TOKEN = re.compile(r'[ \t\r\n,:]*(?:([{\[])|([}\]])|("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"]+))')


def _no_constant(name: str) -> None:
    raise ValueError(name)


def is_json(text: str) -> bool:
    """NaN and Infinity are not JSON. Raises ParseError where the nesting is too deep to tell."""
    if not text.lstrip(" \t\r\n").startswith(("{", "[", '"')):
        return False
    try:
        # Numbers stay text: Python's int() refuses thousands of digits.
        json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except RecursionError:
        raise ParseError(
            "the recipe is nested too deeply", 0, "Make it smaller.", "SW1011"
        ) from None
    except ValueError:
        return False
    return True


def json_events(text: str) -> Iterator[ParseEvent]:
    """`text` is valid JSON."""
    for match in _TOKEN.finditer(text):
        opening, closing, string, word = match.groups()
        start, end = match.start(match.lastindex or 0), match.end()
        if opening:
            yield ParseEvent(
                kind="map" if opening == "{" else "list", start=start, end=end, flow=True
            )
        elif closing:
            yield ParseEvent(kind="end", start=start, end=end)
        elif string:
            yield ParseEvent(kind="scalar", start=start, end=end, text=json.loads(string))
        else:
            yield ParseEvent(kind="scalar", start=start, end=end, text=word, plain=True)
