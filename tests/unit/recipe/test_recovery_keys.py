"""`launch.recovery`: from the recipe into the plan, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import plan_from_json
from shardwright.recipe.literal_types import FAILURE_CAUSES
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import RecoverySection

TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "checkpoint.every_steps": 2}


def test_the_keys_reach_the_plan(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    recovery = {"retries": 5, "min_nodes": 1, "spares": 1, "on": ["host", "hang"]}
    changes = {**TWO_NODES, "launch": {"hostfile": "hosts", "recovery": recovery}}
    compiled = compile_recipe(load_recipe(write_recipe(changes)))
    planned = plan_from_json(compiled.files["plan.json"].decode()).launch.recovery
    assert planned == RecoverySection(retries=5, min_nodes=1, spares=1, on=("host", "hang"))
    assert compiled.files["launch/hostfile"] == b"a slots=2\nb slots=2\n"
    assert compiled.files["launch/spare_hosts"] == b"c slots=2\n"
    assert not [d.code for d in compiled.warnings if d.code.startswith("SW52")]


def test_defaults_and_a_recipe_without_the_section(write_recipe: Callable[..., Path]) -> None:
    """Said or left out, `recovery: null` is one recipe."""
    plain = compile_recipe(load_recipe(write_recipe({"checkpoint.every_steps": 2})))
    said = {"checkpoint.every_steps": 2, "launch": {"recovery": None}}
    document = json.loads(write_recipe(said).read_text())
    document["launch"]["recovery"] = None
    path = write_recipe(said, "said.json")
    path.write_text(json.dumps(document))
    assert compile_recipe(load_recipe(path)).plan.recipe_hash == plain.plan.recipe_hash
    assert json.loads(plain.files["plan.json"])["launch"]["recovery"] is None
    filled = compile_recipe(load_recipe(write_recipe({"launch": {"recovery": {}}})))
    assert filled.plan.launch.recovery == RecoverySection(on=FAILURE_CAUSES)
    assert "SW5215" in [d.code for d in filled.warnings]


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"launch": {"recovery": {"min_nodes": 3}}}, "SW1229", "min_nodes"),
        (
            {"launch": {"recovery": {"min_nodes": 1}}, "cluster.shared_filesystem": False},
            "SW1229",
            "min_nodes",
        ),
        ({"launch": {"recovery": {"on": ["disk"]}}}, "SW1103", "on"),
        ({"launch": {"recovery": {"retries": -1}}}, "SW1104", "retries"),
        ({"launch": {"launcher": "no_ssh", "recovery": {}}}, "SW5214", "recovery"),
        (
            {"launch": {"recovery": {"spares": 1}}, "cluster.nodes": 1, "cluster.gpus_per_node": 4},
            "SW5214",
            "spares",
        ),
    ],
)
def test_what_is_refused(
    write_recipe: Callable[..., Path], changes: dict[str, Any], code: str, key: str
) -> None:
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(write_recipe({**TWO_NODES, **changes})))
    (found,) = caught.value.diagnostics
    assert found.code == code and found.key is not None and key in found.key
    assert found.help
