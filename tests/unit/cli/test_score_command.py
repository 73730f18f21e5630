"""`shardwright score` refuses what it cannot score before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.compile.forward_only_recipe import with_files_of_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.contrastive import PairCase, recipe, write_pairs

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
TINY = RECIPES / "tiny-dpo-cpu.yaml"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["score", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_a_score_file_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scores").mkdir()
    assert "SW1240" in refused(capsys, TINY, "-o", tmp_path / "scores")
    assert [path.name for path in tmp_path.iterdir()] == ["scores"]


def test_top_is_within_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused(capsys, TINY, "-o", tmp_path / "scores", "--top", 257)
    assert "SW1241" in printed and "256 tokens" in printed
    assert not list(tmp_path.iterdir())


def test_a_contrastive_model_has_no_tokens_to_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(PairCase("clip"))))
    assert "SW1242" in refused(capsys, tmp_path / "recipe.yaml", "-o", tmp_path / "scores")
    assert not (tmp_path / "scores.parts").exists()


def test_a_compiled_folder_is_scored_from_its_own_files(tmp_path: Path) -> None:
    """Its recipe's paths are relative to another folder."""
    text = TINY.read_text().replace("path: python-docstrings", "path: ./pairs.jsonl")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "recipe.yaml").write_text(text)
    plan = compile_recipe(load_recipe(tmp_path / "recipe.yaml")).plan
    own = load_recipe(tmp_path / "recipe.yaml")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "recipe.resolved.json").write_text(json.dumps(own.document))
    found = with_files_of_folder(load_recipe(folder / "recipe.resolved.json"), plan, folder)
    assert found.data is not None
    assert found.data.path == str(tmp_path / "pairs.jsonl")
    assert found.model == own.model
