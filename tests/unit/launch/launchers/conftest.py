"""A compiled folder for two nodes, by the recipe's launch section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.two_node_recipes import TWO_NODES, Compile


@pytest.fixture
def compiled(write_recipe: Callable[..., Path], tmp_path: Path) -> Compile:
    (tmp_path / "setup.sh").write_text("cd /\nSET_UP=$undefined-yes; export SET_UP\nfalse\n")

    def make(launch: dict[str, Any], **changes: Any) -> Path:
        recipe = load_recipe(write_recipe({**TWO_NODES, **changes, "launch": launch}))
        write_folder(tmp_path / "out", compile_recipe(recipe).files)
        return tmp_path / "out"

    return make
