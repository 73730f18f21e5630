"""What a code means, at length: `explain SW1234`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics.code_registry import CODES


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeExplanation:
    """title: the registry's line. example, instead: a file with the fault and without; "" where
    there is none. audience: "" or what `--for` has to say for the example; world_size: 0 or what
    `--world-size` has to. source: where in the engine it stands, and the threads of users who met
    it."""

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
    """Of every code about a ds_config that has more than the registry's line."""
    return _read("ds_config_codes.toml")


@functools.cache
def megatron_args_explanations() -> Mapping[str, CodeExplanation]:
    """The same of Megatron-LM's arguments."""
    return _read("megatron_args_codes.toml")


def _read(name: str) -> dict[str, CodeExplanation]:
    file = resources.files("shardwright.diagnostics").joinpath(name)
    table: dict[str, dict[str, str | int]] = tomllib.loads(file.read_text("utf-8"))
    return {code: _explanation(code, entry) for code, entry in table.items()}


def explanation(code: str) -> CodeExplanation | None:
    """None where there is no such code."""
    if code not in CODES:
        return None
    return (
        ds_config_explanations().get(code)
        or megatron_args_explanations().get(code)
        or CodeExplanation(code=code, title=CODES[code])
    )


def _explanation(code: str, entry: Mapping[str, str | int]) -> CodeExplanation:
    def text(key: str) -> str:
        return str(entry.get(key, ""))

    return CodeExplanation(
        code=code,
        title=CODES[code],
        what=text("what"),
        why=text("why"),
        example=text("example"),
        instead=text("instead"),
        audience=text("for"),
        world_size=int(entry.get("world_size", 0)),
        source=text("source"),
    )
