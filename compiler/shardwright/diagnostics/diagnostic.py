"""Defines a diagnostic: a code, one line, its place in the recipe, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.diagnostics.code_registry import CODES

Severity = Literal["error", "warning", "note"]
KeyPath = tuple[str | int, ...]
"""Names a key of the recipe: ("parallelism", "tensor"); () is the document itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place in a text file. `line` and `column` count from 1; 0 means "the file as a whole"."""

    file: str
    line: int
    column: int
    length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Holds the place of each key of the recipe, and the text to show.

    locations: key path -> place of the *value*; key_locations: key path -> place of the key itself.
    texts: file name as printed -> its text.
    """

    file: str
    locations: Mapping[KeyPath, Location] = field(default_factory=dict)
    key_locations: Mapping[KeyPath, Location] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """Holds one finding.

    code: a key of CODES, e.g. "SW3101".
    message: one line, the cause, with the offending value in it.
    help: what to do next; may be several sentences.
    key: the recipe key it is about; the renderer turns it into file, line and caret.
    location: set instead of `key` where there is no recipe key (a YAML syntax error).
    valid: the nearest valid values, where such exist.
    """

    code: str
    message: str
    severity: Severity = "error"
    help: str = ""
    key: KeyPath | None = None
    location: Location | None = None
    valid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code} is not in the registry of diagnostic codes")


def found(
    code: str,
    where: str | KeyPath | Location | None,
    message: str,
    help: str,
    valid: Iterable[int | str] = (),
    severity: Severity = "error",
) -> Diagnostic:
    """Make a diagnostic. where: a recipe key, dotted or as a path, or a place in a text; None where
    it is about neither."""
    place = where if isinstance(where, Location) else None
    key = (
        None
        if isinstance(where, Location)
        else tuple(where.split("."))
        if isinstance(where, str)
        else where
    )
    named = tuple(map(str, valid))
    return Diagnostic(
        code=code,
        message=message,
        severity=severity,
        help=help,
        key=key,
        location=place,
        valid=named,
    )


class Refusal(Exception):
    """Reports bad input: carries every independent error found, never just the first.

    source: where the recipe's keys stand, so that the renderer can show lines; set by whoever knows
    the recipe.
    """

    def __init__(self, *diagnostics: Diagnostic, source: Source | None = None) -> None:
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in diagnostics))
        self.diagnostics: tuple[Diagnostic, ...] = diagnostics
        self.source = source

    def __reduce__(self) -> tuple[type[Refusal], tuple[Diagnostic, ...]]:
        """Pickle the findings: a rank sends them to the others."""
        return type(self), self.diagnostics


def refusal(
    code: str, message: str, help: str, key: KeyPath | None = None, valid: Iterable[str] = ()
) -> Refusal:
    """Make a Refusal with one finding."""
    return Refusal(found(code, key, message, help, valid))
