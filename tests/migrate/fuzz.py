"""Mutated configurations and launch commands through `import`: a recipe or a refusal, no key
dropped in silence, and a text that reads as what was meant, whatever stands in the file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.migrate.config_import import convert_config
from shardwright.migrate.recipe_draft import draft_yaml
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_parser import parse_recipe_text
from shardwright.recipe.recipe_tree import LineOffsets, node_value
from tests.migrate.test_import import COMMAND, unaccounted

PIECES = (
    *("'", '"', "\\", "\n", "--", "=", "--learning_rate", "\u2028", "é"),
    *("\x1b[31m", "#", ": ", "NaN", "1e999", "-1", "{}"),
)
SYNTAX = (
    *("$(", "${", "`", "((", "<<EOF", "$X", "{{ a }}", ")", "\\\n", "[1,2]", "{a: b}", "null"),
    *("!!tag", "&a", "*a", "<<: ", "1e400", "9" * 20, "~", "\x00", "\t"),
)
# A recipe's text that does not read: import never writes one.
READING = (
    "SW1001",
    "SW1003",
    "SW1004",
    "SW1005",
    "SW1006",
    "SW1007",
    "SW1008",
    "SW1009",
    "SW1010",
    "SW1012",
    "SW1015",
)


def changed_command(rng: random.Random) -> str:
    words = COMMAND.split()
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(words))
        words[at : at + rng.randrange(3)] = [rng.choice(PIECES) + rng.choice(("", words[at], "8"))]
    return " ".join(words)


def deep(rng: random.Random) -> str:
    levels = rng.choice((60, 900, 5000, 100_000))
    return rng.choice(
        ("[" * levels, "[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels)
    )


def try_import(
    text: str, launch: str | None, folder: Path, name: str = "ds_config.json"
) -> list[str]:
    """Keys that are dropped in silence; an AssertionError where the recipe does not read as it was
    meant."""
    file = folder / name
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        found = convert_config(str(file), launch, None, str(folder))
    except Refusal as refusal:
        assert render_diagnostics(refusal.diagnostics, refusal.source, color=False)
        return []
    recipe = draft_yaml(found.draft, found.name, [])
    node, errors = parse_recipe_text(recipe, LineOffsets("recipe.yaml", recipe))
    assert node is not None and not [e for e in errors if e.code in READING], (errors, recipe)
    document: Any = node_value(node)
    for key, value in found.draft.values.items():
        place = document
        for part in key.split("."):
            place = place[part]
        assert json.dumps(place) == json.dumps(value), (key, value, place)
    try:
        load_recipe(Path("-"), (), stdin_text=recipe)
    except Refusal as refusal:
        assert render_diagnostics(refusal.diagnostics, refusal.source, color=False)
    return unaccounted(found) if found.document is not None else []


def changed_text(rng: random.Random, text: str) -> str:
    """Put pieces that mean something to a shell, YAML or jinja into a text."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 1, 3, 20)))
        text = text[:at] + rng.choice((*PIECES, *SYNTAX)) + text[end:]
    return text


def commands(rng: random.Random) -> Iterator[str | None]:
    while True:
        yield rng.choice((None, COMMAND, changed_command(rng)))
