"""A draft as YAML, section by section in the order of a recipe, with a comment for what stayed
behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.migrate.recipe_draft import RecipeDraft
from shardwright.utils.json_types import JsonObject, JsonValue

SECTIONS = (
    "model",
    "cluster",
    "training",
    "data",
    "lora",
    "parallelism",
    "launch",
    "extra",
    "checkpoint",
    "tracking",
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RESERVED = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_WIDTH = 116


def draft_yaml(draft: RecipeDraft, name: str, heading: list[str]) -> str:
    tree: dict[str, JsonValue] = {}
    for key, value in draft.values.items():
        *parents, last = key.split(".")
        place: dict[str, JsonValue] = tree
        for parent in parents:
            below = place.setdefault(parent, {})
            assert isinstance(below, dict)
            place = below
        place[last] = value
    lines = [
        *(f"# {escape_control_characters(line)}" for line in heading),
        "version: 1",
        f"name: {scalar(name)}",
        "",
    ]
    for section in SECTIONS:
        value = tree.get(section)
        found = list(_section(draft, section, value if isinstance(value, Mapping) else {}, 0))
        lines += [*found, ""] if found else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(draft: RecipeDraft, path: str, values: JsonObject, depth: int) -> Iterator[str]:
    indent = "  " * depth
    inside = "  " * (depth + 1) if values else indent
    if values:
        yield f"{indent}{scalar(path.rpartition('.')[2])}:"
        for key, value in values.items():
            below = f"{path}.{key}"
            if isinstance(value, Mapping) and value:
                yield from _section(draft, below, value, depth + 1)
            else:
                yield f"{inside}{scalar(key)}: {flow(value)}{_origin_comment(draft, below)}"
    for note in draft.comments(path):
        yield from _comment(note if values else f"{path}: {note}", inside)
    for below in [
        p
        for p in draft.sections()
        if p.rpartition(".")[0] == path and p.rpartition(".")[2] not in values
    ]:
        yield from _section(draft, below, {}, depth + 1 if values else depth)


def _origin_comment(draft: RecipeDraft, key: str) -> str:
    text = draft.fill.get(key) or draft.origins.get(key)
    return f" # {escape_control_characters(text)}" if text else ""


def _comment(text: str, indent: str) -> Iterator[str]:
    line = ""
    for word in escape_control_characters(text).split(" "):
        if line and len(indent) + 2 + len(line) + 1 + len(word) > _WIDTH:
            yield f"{indent}# {line}"
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    yield f"{indent}# {line}"


def flow(value: JsonValue) -> str:
    """On one line; JSON's form of a text is YAML's too."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{scalar(key)}: {flow(below)}" for key, below in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(below) for below in value) + "]"
    return scalar(value)


def scalar(value: JsonValue) -> str:
    if isinstance(value, str) and _WORD.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value, ensure_ascii=not isinstance(value, str) or not value.isprintable())
