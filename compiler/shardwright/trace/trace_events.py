"""Read the events of a torch profiler trace (Chrome JSON, also gzipped) one after the other.

A trace may be gigabytes: no more than one event and one chunk of the file are in memory. The file
is data from anyone, so a mistake in it is a Diagnostic.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from shardwright.diagnostics import Refusal, refusal
from shardwright.utils.file_io import open_regular_file

CHUNK_BYTES = 2**20
MAX_VALUE_CHARACTERS = 32 * 2**20
"""Bounds one event, and one entry beside the events. A rank list of 100,000 ranks has 700 kB."""
GZIP_MAGIC = b"\x1f\x8b"
EVENTS_KEY = "traceEvents"
PROFILE_HELP = (
    "Write one with torch.profiler: `with profile(record_shapes=True) as p: step()`, then "
    "`p.export_chrome_trace(FILE)`."
)

TraceEvent = dict[str, Any]
"""Holds an event as the trace has it; whoever reads a key checks its type."""


@contextlib.contextmanager
def open_profile_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a trace or a snapshot, unpacked where it is gzipped. Raises Refusal: SW3311."""
    try:
        with open_regular_file(path) as raw:
            is_packed = raw.peek(2)[:2] == GZIP_MAGIC
            with gzip.GzipFile(fileobj=raw) if is_packed else contextlib.nullcontext(raw) as file:
                yield cast(IO[bytes], file)
    except EOFError:
        raise cut_short(path, "the gzip stream has no end") from None
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refusal(
            "SW3311",
            f"{str(path)!r} cannot be read: {reason}",
            "Name the file that the profiler wrote, and copy it again if it was damaged.",
        ) from None


def cut_short(path: Path, reason: str) -> Refusal:
    return refusal(
        "SW3313",
        f"{str(path)!r} is cut short: {reason}",
        "The run ended, or the copy did, before the file was complete: export or copy it again.",
    )


def not_a_trace(path: Path, reason: str) -> Refusal:
    return refusal("SW3312", f"{str(path)!r} is no torch profiler trace: {reason}", PROFILE_HELP)


class TraceReader:
    """Reads one trace file.

    entries: what stands beside the events, such as deviceProperties and distributedInfo; complete
        once all events were read
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.entries: dict[str, Any] = {}
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._json = json.JSONDecoder(strict=False)  # names may hold raw control characters
        self._text, self._at, self._read_all = "", 0, False
        self._dropped = 0  # characters before self._text
        self._is_blank = True  # nothing but white space so far

    def events(self) -> Iterator[TraceEvent]:
        """Yield each event that is an object. Raises Refusal: SW3311, SW3312, SW3313."""
        first = self._next_character()
        if first == "":
            raise not_a_trace(self._path, "the file is empty")
        if first == "[":  # the array alone, which Chrome writes too
            yield from self._array()
            return
        if first != "{":
            raise not_a_trace(self._path, "it begins with neither { nor [")
        self._at += 1
        has_events = False
        while (character := self._next_character()) != "}":
            if character == ",":
                self._at += 1
                continue
            key = self._value()
            if self._next_character() != ":" or not isinstance(key, str):
                raise self._unreadable("a key has no value")
            self._at += 1
            if key == EVENTS_KEY and self._next_character() == "[":
                has_events = True
                yield from self._array()
            else:
                self.entries[key] = self._value()
        if not has_events:
            raise not_a_trace(self._path, f"its JSON has no list `{EVENTS_KEY}`")

    def _array(self) -> Iterator[TraceEvent]:
        self._at += 1
        while (character := self._next_character()) != "]":
            if character == ",":
                self._at += 1
                continue
            event = self._value()
            if isinstance(event, dict):
                yield event
        self._at += 1

    def _next_character(self) -> str:
        """Return the next character that is no white space, without passing it; "" at the end of a
        file that held nothing."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in " \t\r\n\ufeff":
                    self._is_blank = False
                    return character
                self._at += 1
            if not self._fill():
                if self._is_blank:
                    return ""
                raise cut_short(self._path, f"it ends after {self._position():,} characters")

    def _value(self) -> Any:
        """Return the next JSON value and pass it."""
        self._next_character()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._unreadable("a value is nested too deeply") from None
            except ValueError:  # not JSON, or not complete yet
                if len(self._text) - self._at > MAX_VALUE_CHARACTERS:
                    raise self._unreadable("a value is no JSON, or has no end") from None
                if not self._fill():
                    raise self._ends_inside_value() from None
                continue
            if end == len(self._text) and self._fill():  # a number may go on
                continue
            self._at = end
            return value

    def _ends_inside_value(self) -> Refusal:
        """Tell a file that was cut off inside a value from one that is no JSON there."""
        rest = self._text[self._at :]
        try:
            self._json.raw_decode(rest)
        except json.JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated string") or not rest[error.pos :].strip()
            if not is_open:
                self._at += error.pos
                return self._unreadable(error.msg[0].lower() + error.msg[1:])
        return cut_short(self._path, "it ends inside an event")

    def _unreadable(self, reason: str) -> Refusal:
        return not_a_trace(self._path, f"character {self._position() + 1:,}: {reason}")

    def _position(self) -> int:
        return self._dropped + self._at

    def _fill(self) -> bool:
        """Append the next chunk and drop what was passed; False at the end of the file."""
        if self._read_all:
            return False
        chunk = self._file.read(CHUNK_BYTES)
        self._read_all = not chunk
        self._dropped += self._at
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=not chunk)
        self._at = 0
        return bool(chunk)
