"""`checkpoint.in_memory`: from the recipe into the plan, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import plan_from_json
from shardwright.recipe.recipe_loader import load_recipe

SECTION = {"every_steps": 4, "in_memory": True}


def test_the_keys_reach_the_plan(write_recipe: Callable[..., Path]) -> None:
    pinned = compile_recipe(load_recipe(write_recipe({"checkpoint": {**SECTION}})))
    checkpoint = plan_from_json(pinned.files["plan.json"].decode()).checkpoint
    assert checkpoint.in_memory and isinstance(checkpoint.in_memory_every, int)
    path = write_recipe({"checkpoint": {**SECTION, "in_memory_every": 3}})
    assert compile_recipe(load_recipe(path)).plan.checkpoint.in_memory_every == 3


def test_a_recipe_without_them(write_recipe: Callable[..., Path]) -> None:
    """Said or left out, no copies are one recipe."""
    plain = compile_recipe(load_recipe(write_recipe({"checkpoint": {"every_steps": 4}})))
    said = {"every_steps": 4, "in_memory": False, "in_memory_every": "auto"}
    same = compile_recipe(load_recipe(write_recipe({"checkpoint": said})))
    assert same.files["plan.json"] == plain.files["plan.json"]
    assert json.loads(plain.files["plan.json"])["checkpoint"]["in_memory"] is False
    assert plan_from_json(plain.files["plan.json"].decode()) == plain.plan


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"checkpoint": {"in_memory_every": 2}}, "SW1249", "checkpoint.in_memory_every"),
        ({"checkpoint": {**SECTION, "in_memory_every": 0}}, "SW1104", "in_memory_every"),
        (
            {
                "checkpoint": SECTION,
                "cluster.nodes": 2,
                "cluster.islands": 2,
                "cluster.inter_island_gbits_per_second": 1,
            },
            "SW1249",
            "checkpoint.in_memory",
        ),
        (
            {"checkpoint": SECTION, "cluster.host_memory_gib": 0.001},
            "SW5220",
            "checkpoint.in_memory",
        ),
    ],
)
def test_what_is_refused(
    write_recipe: Callable[..., Path], changes: dict[str, Any], code: str, key: str
) -> None:
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(write_recipe(changes)))
    found = {d.code: d for d in caught.value.diagnostics}
    assert code in found and key in f"{found[code].message} {found[code].key}"
    assert found[code].help
