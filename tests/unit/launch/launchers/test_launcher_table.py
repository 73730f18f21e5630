"""The table of launchers: what a recipe offers of it, and what its rows need."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import recipe_schema, schema_properties
from shardwright.recipe.task_options import TASK_SERVICES
from shardwright.utils.installation import templates_folder

START = re.compile(r'include "launch/start/" ~ plan.target ~ "/([^"]+)"')


def test_the_recipe_offers_the_table() -> None:
    launch = schema_properties(schema_properties(recipe_schema(), {})["launch"], {})
    assert set(launch["launcher"]["enum"]) == {"auto", *LAUNCHERS}  # type: ignore[arg-type]
    sections = {
        "task" if row.name in TASK_SERVICES else row.name
        for row in LAUNCHERS.values()
        if row.scheduler and row.name != "ray"  # all of it follows from the plan
    }
    assert sections <= launch.keys()


def test_a_scheduler_has_what_its_launcher_calls() -> None:
    for row in LAUNCHERS.values():
        if row.scheduler:
            module = import_module(row.scheduler)
            assert all(
                callable(getattr(module, name)) for name in ("submit", "checks", "allocated_hosts")
            )


@pytest.mark.parametrize("engine", list(ENGINES))
def test_an_engine_has_the_words_that_start_its_ranks_or_refuses_the_launcher(
    engine: str, write_recipe: Callable[..., Path]
) -> None:
    launch = templates_folder() / "launch"
    there = {path.name for path in (launch / "start" / engine).iterdir()}
    for row in LAUNCHERS.values():
        texts = [(launch / name).read_text(encoding="utf-8") for name in row.templates.values()]
        if {name for text in texts for name in START.findall(text)} <= there:
            continue
        one = {
            "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
            "parallelism": {},
            "target": engine,
        }
        with pytest.raises(Refusal) as refused:
            compile_recipe(load_recipe(write_recipe({**one, "launch.launcher": row.name})))
        assert any(d.key == ("launch", "launcher") for d in refused.value.diagnostics), row.name
    assert there
