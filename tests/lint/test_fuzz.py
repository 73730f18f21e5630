"""Mutated configurations and recipes: a finding or silence, never a traceback; a misspelt key is
always found.

`make prove` has 20,000 of them.
"""

from __future__ import annotations

import contextlib
import json
import random
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.lint.ds_config_document import parse_ds_config
from shardwright.lint.ds_config_linter import diagnostic, lint, linted_ds_config
from shardwright.models.model_sources import read_config_file
from shardwright.recipe.recipe_loader import load_recipe
from tests.lint.test_rules import GOOD
from tests.migrate.fuzz import commands, deep, try_import
from tests.unit.recipe.test_recipe_loader import FULL

Path_ = tuple[str | int, ...]
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, 2**63, 10**400),
    *("", "auto", "true", "3", "1e9", "cpu", "nan", "\u202e", "字", "x" * 5000),
    *([], [1], [[]], {}, {"stage": 3}, {"enabled": "true"}, [{"device": None}]),
)
SECONDS_AT_MOST = 2.0


def places(value: Any, path: Path_ = ()) -> list[Path_]:
    found: list[Path_] = [path] if path else []
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in items:
        found += places(below, (*path, key))
    return found


def changed(document: Any, path: Path_, change: Callable[[Any, Any], None]) -> Any:
    """A copy in which `change(parent, last key)` was done."""
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return copy


def put(value: Any) -> Callable[[Any, Any], None]:
    return lambda parent, key: parent.__setitem__(key, value)


def misspelt(rng: random.Random, word: str) -> str:
    """One letter more, less, or other, or two swapped: never the same word."""
    while True:
        at, letter = rng.randrange(len(word)), rng.choice(string.ascii_lowercase + "_")
        swapped = word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
        choices = (
            word[:at] + word[at + 1 :],
            word[:at] + letter + word[at:],
            word[:at] + letter + word[at + 1 :],
            swapped,
        )
        wrong = rng.choice(choices)
        if wrong and wrong != word:
            return wrong


def renamed(document: Any, path: Path_, name: str) -> Any:
    """With the key at `path` called `name`, in its place."""

    def change(parent: Any, key: Any) -> None:
        items = [(name if k == key else k, v) for k, v in parent.items()]
        parent.clear()
        parent.update(items)

    return changed(document, path, change)


def found_in(text: str) -> list[tuple[Path_ | None, str]]:
    """Each finding's key and what is printed for it."""
    try:
        document = parse_ds_config("ds_config.json", text)
    except Refusal as refusal:
        return [
            (d.key, render_diagnostics([d], refusal.source, color=False))
            for d in refusal.diagnostics
        ]
    findings = lint(document, linted_ds_config(document))
    return [
        (f.key, render_diagnostics([diagnostic(document, f)], document.source, color=False))
        for f in findings
    ]


def scrambled(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    piece = rng.choice(
        ("", "{", "}", ",", '"', "\\", "\x00", "null", "é", "//", "\n", text[: rng.randrange(40)])
    )
    return text[:at] + piece + text[at + rng.choice((0, 1, 5)) :]


def fuzz_configs(count: int, seed: int) -> dict[str, int]:
    """typos: misspelt keys that are no other key of the section; silent: those without any finding
    at them."""
    rng = random.Random(seed)
    corpus = [(p, document) for p in GOOD if isinstance(document := _plain(p), dict)]
    totals = {"mutations": 0, "typos": 0, "silent_typos": 0}
    for _ in range(count):
        path, document = rng.choice(corpus)
        where = rng.choice(places(document))
        kind = rng.choice(("typo", "value", "text", "drop"))
        totals["mutations"] += 1
        began = time.process_time()
        if kind == "typo" and isinstance(where[-1], str) and not where[-1].startswith(("_", "//")):
            wrong = misspelt(rng, where[-1])
            text = json.dumps(renamed(document, where, wrong))
            told = found_in(text)
            if _is_key(document, where, wrong):
                continue
            totals["typos"] += 1
            spot = (*where[:-1], wrong)
            if not any(key is not None and tuple(key)[: len(spot)] == spot for key, _ in told):
                totals["silent_typos"] += 1
                print("silent:", path.name, ".".join(map(str, spot)))
        elif kind == "text":
            found_in(scrambled(rng, path.read_text()))
        elif kind == "drop":
            found_in(json.dumps(changed(document, where, lambda parent, key: parent.pop(key))))
        else:
            odd = rng.choice(ODD)
            found_in(json.dumps(changed(document, where, put(odd))))
        assert time.process_time() - began < SECONDS_AT_MOST, (path, where, kind)
    return totals


def _as_written(path: Path) -> Any:
    """The recipe as plain data, without the defaults."""
    from ruamel.yaml import YAML

    loaded = YAML(typ="safe").load(path.read_text())
    return json.loads(json.dumps(loaded))


def _plain(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None  # Hjson


def _is_key(document: Any, where: Path_, wrong: str) -> bool:
    """Whether the misspelt word is a key of that section by itself: then it is another setting, not
    a typo."""
    from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema, schema_mismatches

    only = renamed(document, where, wrong)
    return not any(
        m.kind == "unknown" and m.path == (*where[:-1], wrong)
        for m in schema_mismatches(only, ds_config_schema())
    )


def fuzz_recipes(count: int, seed: int, folder: Path) -> dict[str, int]:
    rng = random.Random(seed)
    totals = {"mutations": 0, "typos": 0, "silent_typos": 0}
    file = folder / "recipe.json"
    (folder / "full.yaml").write_text(FULL)
    document = _as_written(folder / "full.yaml")
    # A model's own configuration is stage 2's; environment variables have the names that users give
    # them.
    own = ("config", "env")
    spots = [where for where in places(document) if not any(key in own for key in where[:-1])]
    for _ in range(count):
        where = rng.choice(spots)
        typo = rng.random() < 0.5 and isinstance(where[-1], str)
        if typo:
            changed_to = renamed(document, where, misspelt(rng, str(where[-1])))
        else:
            odd = rng.choice(ODD)
            changed_to = changed(document, where, put(odd))
        file.write_text(json.dumps(changed_to))
        totals["mutations"] += 1
        totals["typos"] += typo
        try:
            load_recipe(file)
            if typo:
                totals["silent_typos"] += 1
                print("silent:", ".".join(map(str, where)))
        except Refusal as refusal:
            assert render_diagnostics(refusal.diagnostics, refusal.source, color=False)
    return totals


def fuzz_imports(count: int, seed: int, folder: Path) -> dict[str, int]:
    """dropped: keys of a file that the recipe neither carries nor names in a comment."""
    rng = random.Random(seed)
    corpus = [document for p in GOOD if isinstance(document := _plain(p), dict)]
    launches = commands(rng)
    totals = {"mutations": 0, "dropped": 0}
    for _ in range(count):
        document = rng.choice(corpus)
        where = rng.choice(places(document))
        kind = rng.choice(("typo", "value", "text", "drop", "deep"))
        if kind == "typo" and isinstance(where[-1], str):
            text = json.dumps(renamed(document, where, misspelt(rng, where[-1])))
        elif kind == "text":
            text = scrambled(rng, json.dumps(document))
        elif kind == "drop":
            text = json.dumps(changed(document, where, lambda parent, key: parent.pop(key)))
        elif kind == "deep":
            text = json.dumps(changed(document, where, put("HERE"))).replace('"HERE"', deep(rng))
        else:
            text = json.dumps(changed(document, where, put(rng.choice(ODD))))
        totals["mutations"] += 1
        began = time.process_time()
        dropped = try_import(text, next(launches), folder)
        totals["dropped"] += len(dropped)
        assert time.process_time() - began < SECONDS_AT_MOST, (where, kind)
    return totals


def fuzz_depth(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Nesting without end in every text that is read: recipes, ds_configs, a model's
    configuration."""
    rng = random.Random(seed)
    recipe = {"version": 1, "name": "a", "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"}}
    for _ in range(count):
        found_in(json.dumps({"train_batch_size": 8, "a": "HERE"}).replace('"HERE"', deep(rng)))
        (folder / "deep.json").write_text(
            json.dumps({**recipe, "model": "HERE"}).replace('"HERE"', deep(rng))
        )
        with contextlib.suppress(Refusal):
            load_recipe(folder / "deep.json")
        (folder / "config.json").write_text(deep(rng))
        with contextlib.suppress(Refusal):
            read_config_file(folder / "config.json")
    return {"mutations": 3 * count}


def test_a_sample_of_mutated_imports(tmp_path: Path) -> None:
    totals = fuzz_imports(200, 1, tmp_path)
    assert totals == {"mutations": 200, "dropped": 0}
    fuzz_depth(10, 1, tmp_path)


def test_a_sample_of_mutated_configurations() -> None:
    totals = fuzz_configs(500, seed=1)
    assert totals["typos"] > 50 and totals["silent_typos"] == 0


def test_a_sample_of_mutated_recipes(tmp_path: Path) -> None:
    totals = fuzz_recipes(200, 1, tmp_path)
    assert totals["typos"] > 50 and totals["silent_typos"] == 0


@pytest.mark.prove
def test_twenty_thousand_mutations(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    configs, recipes = fuzz_configs(10_000, seed=2), fuzz_recipes(10_000, 2, tmp_path)
    imports, depth = fuzz_imports(5_000, 2, tmp_path), fuzz_depth(300, 2, tmp_path)
    assert configs["silent_typos"] == recipes["silent_typos"] == imports["dropped"] == 0
    proved("fuzz", "ds_config", {**configs, "tracebacks": 0})
    proved("fuzz", "recipe", {**recipes, "tracebacks": 0})
    proved("fuzz", "import", {**imports, "tracebacks": 0})
    proved("fuzz", "nesting", {**depth, "tracebacks": 0})
