"""Whatever the bytes: a Recipe or a Refusal with a place, nothing else; and never slow."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import diagnostic_to_json, render_diagnostics
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import fill_in_defaults, recipe_schema
from shardwright.recipe.schema_errors import schema_errors
from shardwright.utils.json_values import JsonObject, JsonValue
from tests.unit.recipe.test_bad_input import GOOD, JSON
from tests.unit.recipe.test_recipe_loader import FULL

FAST = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
PIECES = st.sampled_from(
    [
        "\n",
        "  ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "#",
        "&a ",
        "*a",
        "!!x ",
        "<<: ",
        "---\n",
        "%",
        "\t",
        "|\n",
        ">\n",
        "null",
        "~",
        ".nan",
        "1e999",
        "-1",
        "0",
        "true",
        "auto",
        "\\",
        "\\u",
        "\ud800",
        "\x1b[31m",
        "\u202e",
        "\u2028",
        "é",
        "字",
        "extends: recipe.yaml\n",
        "? ",
        "\r",
        "\x85",
        "0x",
        "1" * 50,
        ",",
        "data: ",
        "kind: chat\n",
        "mixture: ",
    ]
)
KEYS = st.sampled_from(
    [
        "version",
        "name",
        "model",
        "training",
        "data",
        "kind",
        "mixture",
        "gpu",
        "extends",
        "steps",
        "env",
        "x",
        "",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "text", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def reads(data: bytes, overrides: tuple[str, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(data)
        try:
            recipe = load_recipe(path, overrides)
        except Refusal as refusal:
            assert refusal.diagnostics
            text = render_diagnostics(refusal.diagnostics, refusal.source, color=False)
            assert "\x1b" not in text and "\u202e" not in text
            assert all(diagnostic_to_json(d, refusal.source)["file"] for d in refusal.diagnostics)
        else:
            json.dumps(recipe.document, allow_nan=False)


@FAST
@given(
    st.sampled_from([GOOD, FULL, JSON]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 12), PIECES), min_size=1, max_size=6),
)
def test_mutated_text(text: str, changes: list[tuple[int, int, str]]) -> None:
    for place, removed, piece in changes:
        place %= len(text) + 1
        text = text[:place] + piece + text[place + removed :]
    reads(text.encode("utf-8", "surrogatepass"))


@FAST
@given(st.binary(max_size=200))
def test_bytes(data: bytes) -> None:
    reads(data)


@FAST
@given(KEYS, VALUES, st.lists(KEYS, max_size=3))
def test_replaced_values(key: str, value: object, path: list[str]) -> None:
    document = json.loads(JSON)
    below = document
    for part in path:
        if isinstance(below.get(part), dict):
            below = below[part]
    below[key] = value
    reads(json.dumps(document).encode())


@FAST
@given(
    st.lists(st.text(max_size=30) | st.builds("{}.{}={}".format, KEYS, KEYS, PIECES), max_size=3)
)
def test_overrides(overrides: list[str]) -> None:
    reads(GOOD.encode(), tuple(overrides))


REPLACEMENTS: tuple[JsonValue, ...] = (
    *(None, True, 0, -1, 1.5, 2.0, 10**12, "", "auto", "x y", "fp32", "a/b", "1:2"),
    *([], ["a"], [1, 2], {}, {"a": 1}, {"full": 2}, {"kind": "text"}),
)


def test_the_schema_is_checked_as_jsonschema_does() -> None:
    """A value is replaced, or a key left out: both refuse the document, or neither does."""
    sections = """\
tracking: {tensorboard: true, wandb: {project: p}, noise_scale: {every_steps: 5}}
lora: {rank: 8, target_modules: [a]}
launch: {kubernetes: {image: i, volume_claim: v, directory: /shared/a}, env: {A: b}, env_from: [C]}
data: {kind: chat, path: b, template: t, images: {per_row: 1, max_pixels: 4096}}
"""
    valid = Draft202012Validator(dict(recipe_schema()))
    documents = [
        cast(JsonObject, fill_in_defaults(recipe_schema(), YAML(typ="safe", pure=True).load(text)))
        for text in (GOOD, FULL, GOOD + sections)
    ]
    random = Random(7)
    refused = 0
    for _ in range(300):
        document = json.loads(json.dumps(random.choice(documents)))
        place: Any = document
        while True:
            key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not place[key] or not isinstance(place[key], dict | list) or random.random() < 0.2:
                break
            place = place[key]
        if isinstance(place, dict) and random.random() < 0.2:
            del place[key]
        else:
            place[key] = random.choice(REPLACEMENTS)
        is_valid = valid.is_valid(document)
        assert (schema_errors(document) == ()) == is_valid, document
        refused += not is_valid
    assert 50 < refused < 250
