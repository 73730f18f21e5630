"""Explains a code at length: `explain SW1234`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics.code_registry import CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExplanation:
    """Holds the explanation of a code.

    title: the registry's line. example, instead: a file with the fault and the same file without;
    "" where there is none. audience, world_size: `--for` and `--world-size` that the example needs,
    "" and 0 where none. source: the engine's line, and threads of users who met the fault.
    """

    code: str
    title: str
    what: str = ""
    why: str = ""
    example: str = ""
    instead: str = ""
    audience: str = ""
    world_size: int = 0
    source: str = ""


@functools.cache
def ds_config_explanations() -> Mapping[str, CodeExplanation]:
    """Returns the explanation of each ds_config code that has more than the registry's line."""
    return _read("ds_config_codes.toml")


@functools.cache
def megatron_args_explanations() -> Mapping[str, CodeExplanation]:
    """Returns the explanations of the codes about Megatron-LM's arguments."""
    return _read("megatron_args_codes.toml")


def _read(name: str) -> dict[str, CodeExplanation]:
    file = resources.files("shardwright.diagnostics").joinpath(name)
    table: dict[str, dict[str, str | int]] = tomllib.loads(file.read_text("utf-8"))
    return {
        code: CodeExplanation(
            code=code,
            title=CODES[code],
            what=str(entry.get("what", "")),
            why=str(entry.get("why", "")),
            example=str(entry.get("example", "")),
            instead=str(entry.get("instead", "")),
            audience=str(entry.get("for", "")),
            world_size=int(entry.get("world_size", 0)),
            source=str(entry.get("source", "")),
        )
        for code, entry in table.items()
    }


def explanation(code: str) -> CodeExplanation | None:
    """Returns the explanation of a code; None where there is no such code."""
    if code not in CODES:
        return None
    return (
        ds_config_explanations().get(code)
        or megatron_args_explanations().get(code)
        or CodeExplanation(code=code, title=CODES[code])
    )
