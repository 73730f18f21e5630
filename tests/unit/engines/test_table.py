"""The table of engines: what a plan and a recipe find in it."""

from __future__ import annotations

from pathlib import Path

from shardwright.engines.kernels import KERNELS
from shardwright.engines.table import DEFAULT, ENGINES, engine_of
from shardwright.plan.serialize import read_plan
from shardwright.recipe.schema import properties, recipe_schema

TESTS = Path(__file__).parents[2]


def test_a_plan_finds_its_engine() -> None:
    """A folder of an earlier version names none."""
    old = read_plan(TESTS / "launch" / "old_folder")
    assert old.target is None and engine_of(old) is ENGINES["deepspeed"]
    (case,) = TESTS.glob("cases/llama-pp2-tp2/expected")
    plan = read_plan(case)
    assert plan.target == "deepspeed" and engine_of(plan) is ENGINES[plan.target]


def test_the_recipe_offers_the_table() -> None:
    offered = properties(recipe_schema(), {})
    assert offered["target"]["enum"] == list(ENGINES) and offered["target"]["default"] == DEFAULT
    assume = properties(offered["assume"], {})
    assert assume["kernels"]["enum"] == list(KERNELS)


def test_a_kernel_set_names_an_engine_of_the_table() -> None:
    assert {kernels.engine for kernels in KERNELS.values()} - {None} <= ENGINES.keys()
