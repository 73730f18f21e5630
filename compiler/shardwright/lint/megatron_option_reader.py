"""A shell script or an arguments file -> the options that pretrain_gpt.py is given, and where each
stands.

Words are read as a shell splits them, without running anything: `NAME=value` is known in `$NAME`
and `${NAME}` afterwards; any other expansion is a value that is not known. Quotes and parentheses
only separate.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics import Location, Source
from shardwright.recipe.parse_events import LineOffsets

Span = tuple[int, int]
_WORD = re.compile(r"[^\s\"'()]+")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=")
_EXPANDED = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """values: how many an option takes: a number, "+" or "*". kind: int, float or text. choices: ()
    where any does."""

    values: int | str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOption:
    """values: with None for one that a variable of elsewhere stands for."""

    name: str
    values: tuple[str | None, ...]
    place: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """given: in the order of the file. source: the text to show."""

    given: tuple[MegatronOption, ...]
    source: Source
    world_size: int | None

    def last(self, name: str) -> MegatronOption | None:
        """argparse takes the last of several."""
        return next((g for g in reversed(self.given) if g.name == name), None)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """default: where it is not given. None: not known."""
        found = self.last(name)
        if found is None:
            return default
        value = found.values[0] if found.values else None
        return int(value) if value is not None and re.fullmatch(r"[+-]?\d+", value) else None

    def has(self, name: str) -> bool:
        return self.last(name) is not None


@functools.cache
def options() -> Mapping[str, OptionSpec]:
    """Those of Megatron-LM core_v0.19.0's parser (tools/generate/megatron_argument_parser.py)."""
    text = resources.files("shardwright.lint").joinpath("megatron_options.json").read_text("utf-8")
    return {
        name: OptionSpec(values=values, kind=kind, choices=tuple(map(str, choices)))
        for name, (values, kind, choices) in json.loads(text)["options"].items()
    }


def read_arguments(name: str, text: str, world_size: int | None) -> Arguments:
    lines = LineOffsets(name, text)
    given: list[MegatronOption] = []
    words = list(_words(text))
    at = 0
    while at < len(words):
        (start, end), word = words[at]
        at += 1
        if word is None or not re.match(r"--[A-Za-z]", word):
            continue
        option, _, joined = word.partition("=")
        values: list[str | None] = [joined] if joined else []
        while not joined and at < len(words) and not (words[at][1] or "").startswith("--"):
            values.append(words[at][1])
            at += 1
        known = options().get(option)
        if known is not None and isinstance(
            known.values, int
        ):  # what follows belongs to something else
            values = values[: known.values]
        given.append(MegatronOption(name=option, values=tuple(values), place=lines.at(start, end)))
    return Arguments(
        given=tuple(given), source=Source(file=name, texts={name: text}), world_size=world_size
    )


def _words(text: str) -> Iterator[tuple[Span, str | None]]:
    """Those that can be options of the script: of a line that starts a program, what stands behind
    its .py file."""
    variables: dict[str, str] = {}
    offset, continued, skips = 0, False, False
    for line in text.splitlines(keepends=True):
        uncommented = _COMMENT.sub("", line.rstrip("\r\n"))
        words = [m for m in _WORD.finditer(uncommented) if m[0] != "\\"]
        if not continued:
            skips = bool(words) and _starts_program(uncommented, words[0][0])
        continued = uncommented.rstrip().endswith("\\")
        assigned = _ASSIGNED.match(uncommented.strip())
        for m in words:
            whole = m[0]
            if assigned and whole.startswith(f"{assigned[1]}") and "=" in whole:
                whole = whole.partition("=")[2]
                if whole and not whole.startswith("--"):
                    value = _expanded(whole, variables)
                    if value is not None:
                        variables[assigned[1]] = value
                    continue
            if skips:
                skips = not whole.endswith(".py")
                continue
            if whole and whole != "export":
                yield (offset + m.start(), offset + m.end()), _expanded(whole, variables)
        offset += len(line)


def _starts_program(line: str, first: str) -> bool:
    return (
        not first.startswith("--")
        and not _ASSIGNED.match(line.strip())
        and not first.startswith("$")
    )


def _expanded(word: str, variables: Mapping[str, str]) -> str | None:
    """None where a part of it is not known."""
    known = True

    def value(m: re.Match[str]) -> str:
        nonlocal known
        found = variables.get(m[1] or m[3], m[2])
        known &= found is not None
        return found or ""

    text = _EXPANDED.sub(value, word)
    return text if known and "$" not in text and "`" not in text else None
