"""`plan --pin ROW`: the row becomes the recipe's only layout, and nothing else of the file
changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.factory import SMALL_LLAMA

RECIPE = f"""# for the Tuesday meeting
version: 1
name: pinned   # a name
model: {{config: {json.dumps(SMALL_LLAMA)}, weights: random}}
cluster: {{nodes: 1, gpus_per_node: 8, gpu: "h100-sxm-80gb"}}
training:
  # short
  sequence_length: 128
  global_batch_size: 16
  steps: 10
"""


def rows(path: str, capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main(["plan", "--json", path, *argv]) == 0
    plans: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["plans"]
    return plans


def test_the_row_is_the_only_layout_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    wanted = rows(str(path), capsys)[1]["strategy"]
    assert rows(str(path), capsys, "--pin", "2")[1]["strategy"] == wanted
    pinned = path.read_text()
    assert pinned.startswith(RECIPE[: RECIPE.index("model:")])
    assert "  # short\n" in pinned and 'gpu: "h100-sxm-80gb"' in pinned
    best, *today = rows(str(path), capsys)
    assert best["strategy"] == wanted
    assert all(plan["strategy"]["tensor"] == 1 for plan in today)


def test_another_file_and_a_json_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "recipe.yaml", tmp_path / "copy.yaml"
    path.write_text(RECIPE)
    assert main(["plan", str(path), "--pin", "1", "-o", str(copy)]) == 0
    assert path.read_text() == RECIPE
    assert load_recipe(copy).parallelism.tensor is not None
    assert main(["plan", str(path), "--pin", "1", "-o", str(copy)]) == 1  # never over another file
    assert "is there already" in capsys.readouterr().err
    document = tmp_path / "recipe.json"
    document.write_text(
        json.dumps(
            {
                "version": 1,
                "name": "json",
                "model": {"config": SMALL_LLAMA, "weights": "random"},
                "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
                "training": {"sequence_length": 128, "global_batch_size": 16, "steps": 10},
            }
        )
    )
    assert main(["plan", str(document), "--pin", "1"]) == 0
    assert json.loads(document.read_text())["parallelism"]["offload"] == "none"


def test_a_base_with_a_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pins, and the number of nodes, stand in the file that was named."""
    base, path = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    text = RECIPE.replace("nodes: 1", "nodes: auto").replace(
        "steps: 10", "steps: 10\n  days_at_most: 1"
    )
    base.write_text(text + "parallelism: {tensor: auto}\n")
    path.write_text("extends: base.yaml\nname: mine\n")
    assert main(["plan", str(path), "--pin", "1"]) == 0
    recipe = load_recipe(path)
    assert recipe.cluster.nodes == 1 and recipe.training.days_at_most is None
    assert recipe.parallelism.tensor is not None
    assert base.read_text().startswith(text)


def test_a_models_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [
        "plan",
        "Qwen/Qwen3-8B",
        "--gpu",
        "h100-sxm-80gb",
        "--nodes",
        "1",
        "--top",
        "2",
        "--pin",
        "1",
    ]
    assert main(argv) == 0
    assert load_recipe(tmp_path / "Qwen3-8B.yaml").parallelism.pipeline is not None
    assert main(argv) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--pin", "99"), "the table has"),
        (("--pin", "1", "--set", "training.steps=5"), "--set"),
        (("--pin", "0"), "--pin"),
    ],
)
def test_what_cannot_be_pinned(
    argv: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert main(["plan", str(path), *argv]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
    assert path.read_text() == RECIPE


def test_a_layout_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + "parallelism: {pipeline: 2, zero_stage: 3}\n")
    before = path.read_text()
    assert main(["plan", str(path), "--pin", "1"]) in (0, 1)
    assert path.read_text() == before or load_recipe(path).parallelism.pipeline == 1
