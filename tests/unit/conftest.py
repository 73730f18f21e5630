"""What the tests of checkpoints start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from tests.conftest import SMALL_RECIPE


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the small recipe, once for each file of tests: copy it before you write into
    it."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "recipe.json").write_text(json.dumps(SMALL_RECIPE))
    assert cli.main(["compile", str(folder / "recipe.json"), "-o", str(folder / "out")]) == 0
    return folder / "out"
