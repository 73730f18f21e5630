"""The table of launchers: what a recipe offers of it, and what its rows need."""

from __future__ import annotations

import re
from importlib import import_module

from shardwright.engines.table import ENGINES
from shardwright.launchers.table import LAUNCHERS
from shardwright.recipe.schema import properties, recipe_schema
from shardwright.resources import templates_dir

START = re.compile(r'include "launch/start/" ~ plan.target ~ "/([^"]+)"')


def test_the_recipe_offers_the_table() -> None:
    launch = properties(properties(recipe_schema(), {})["launch"], {})
    assert set(launch["launcher"]["enum"]) == {"auto", *LAUNCHERS}  # type: ignore[arg-type]
    assert {row.name for row in LAUNCHERS.values() if row.scheduler} <= launch.keys()


def test_a_scheduler_has_what_its_launcher_calls() -> None:
    for row in LAUNCHERS.values():
        if row.scheduler:
            module = import_module(row.scheduler)
            assert all(callable(getattr(module, name)) for name in ("submit", "checks", "allocated_hosts"))


def test_every_engine_that_trains_has_the_words_that_start_its_ranks() -> None:
    launch = templates_dir() / "launch"
    needed = {name for path in launch.glob("*.j2") for name in START.findall(path.read_text(encoding="utf-8"))}
    assert needed
    for engine in ENGINES.values():
        if engine.runtime:
            assert {path.name for path in (launch / "start" / engine.name).iterdir()} == needed, engine.name
