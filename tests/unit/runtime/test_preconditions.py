"""What must hold on this machine before the launcher starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwright.compile import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.load import load_recipe
from shardwright.runtime.preconditions import check_machine


def test_weights_that_are_gone(write_recipe: Callable[..., Path], small_recipe: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_recipe["model"]["config"]))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    plan = compile_recipe(load_recipe(write_recipe({"model": {"source": "./weights"}}))).plan
    check_machine(plan, tmp_path, None)
    shutil.rmtree(folder)
    with pytest.raises(Refusal) as caught:
        check_machine(plan, tmp_path, None)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SW6007" and str(folder) in diagnostic.message
