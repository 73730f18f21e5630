"""What both readers (YAML and JSON) report: a flat stream of events, so that nesting costs no
recursion."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import Literal

from shardwright.diagnostics import Location

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
