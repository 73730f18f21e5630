"""The compile knows engines by what their rows say: no code of it has the name of one."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright
from shardwright.cost.cost_constants import constant_entries
from shardwright.engines.engine_table import ENGINES
from shardwright.recipe.objectives import ObjectiveSection, ObjectiveTraits

PACKAGE = Path(shardwright.__file__).parent
ROOMS = ("compile", "plan", "cost", "search", "layout")
OBJECTIVE_FIELDS = {
    field.name for kind in (ObjectiveSection, ObjectiveTraits) for field in dataclasses.fields(kind)
}
MODULES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


def engines_named(source: str) -> Iterator[str]:
    """Identifiers, modules and keys. Sentences (docstrings, messages) may name engines: what has a
    space in it."""
    for node in ast.walk(ast.parse(source)):
        names: tuple[str, ...] = ()
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " not in node.value.strip()
        ):
            names = (node.value,)
        elif isinstance(node, ast.Name):
            names = (node.id,)
        elif isinstance(node, ast.Attribute):
            names = (node.attr,)
        elif isinstance(node, ast.arg | ast.keyword):
            names = (node.arg or "",)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            names = (node.name,)
        elif isinstance(node, ast.ImportFrom):
            names = (node.module or "",)
        yield from (name for name in names if any(engine in name.lower() for engine in ENGINES))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_engine_is_named(path: Path) -> None:
    """The constants that the fit has for one engine's kernels are called after it, as in
    constants.json; the reference of an objective is a model."""
    found = set(engines_named(path.read_text(encoding="utf-8")))
    found -= constant_entries().keys() | OBJECTIVE_FIELDS
    assert not found, (
        f"{path.relative_to(PACKAGE)} names {sorted(found)}: ask engines/engine_table.py"
    )


def test_the_check_sees_what_it_should() -> None:
    source = """
from shardwright.engines.deepspeed.ds_config import extra_errors
if recipe.target == "megatron":
    is_megatron = x.deepspeed
"""
    assert len(list(engines_named(source))) == 4
    assert not list(engines_named('"""What DeepSpeed does."""\nmessage = "DeepSpeed refuses it"'))
