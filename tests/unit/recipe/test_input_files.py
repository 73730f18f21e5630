"""Files that a recipe names: missing, of the wrong kind, or fine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.diagnostics.diagnostic_rendering import location_of
from shardwright.recipe.input_file_checks import check_files
from tests.unit.recipe.test_bad_input import GOOD
from tests.unit.recipe.test_recipe_loader import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "corpus" / "deep" / "a.txt").write_text("a")
    (tmp_path / "corpus" / "[1].txt").write_text("a")
    for name in ("m.idx", "m.bin", "hosts", "n.idx"):
        (tmp_path / name).touch()
    np.save(tmp_path / "good.npy", np.zeros((4, 128), dtype=np.uint16))
    np.save(tmp_path / "short.npy", np.zeros((4, 64), dtype=np.int32))
    np.save(tmp_path / "float.npy", np.zeros((4, 128)))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def found(line: str, folder: Path) -> list[Diagnostic]:
    text = GOOD
    if line.startswith("source"):
        text = text.replace("config: {model_type: llama, hidden_size: 64}", line)
        line = ""
    recipe = load(f"{text}{line}\n", folder)
    diagnostics = list(check_files(recipe))
    places = [location_of(d, recipe.source) for d in diagnostics]
    assert all(place is not None and place.line == (4 if not line else 13) for place in places)
    return diagnostics


@pytest.mark.parametrize(
    "line",
    [
        "",
        "data: {kind: text, path: python-stdlib}",
        "data: {kind: text, path: 'corpus/**/*.txt'}",
        "data: {kind: text, path: corpus/deep/a.txt}",
        "data: {kind: text, path: 'corpus/[1].txt'}",
        "data: {kind: tokens, path: good.npy}",
        "data: {kind: megatron, path: m}",
        "data: {kind: synthetic}",
        (
            "data: {mixture: [{kind: tokens, path: good.npy, weight: 1}, {kind: synthetic, "
            "weight: 1}]}"
        ),
        "validation: {kind: tokens, path: good.npy}",
        "launch: {hostfile: hosts}",
        "source: org/name",
        "source: ./model",
        "source: model",
    ],
)
def test_fine(line: str, folder: Path) -> None:
    assert found(line, folder) == []


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("data: {kind: text, path: 'corpus/*.text'}", "SW1301", "no file matches"),
        ("data: {kind: text, path: corpus}", "SW1301", "is a folder"),
        ("data: {kind: jsonl, path: python-stdlib}", "SW1301", "no file matches"),
        ("data: {kind: tokens, path: goood.npy}", "SW1301", "does not exist"),
        ("data: {kind: tokens, path: corpus}", "SW1302", "is a folder"),
        ("data: {kind: tokens, path: short.npy}", "SW1302", "sequences of 64 tokens"),
        ("data: {kind: tokens, path: float.npy}", "SW1302", "float64"),
        ("data: {kind: tokens, path: text.npy}", "SW1302", "is not a .npy array"),
        ("data: {kind: tokens, path: empty.npy}", "SW1302", "is not a .npy array"),
        ("data: {kind: megatron, path: n}", "SW1301", "n.bin"),
        ("data: {kind: text, path: python-stdlib, tokenizer: ./none}", "SW1301", "none"),
        (
            "data: {mixture: [{kind: tokens, path: none.npy, weight: 1}]}",
            "SW1301",
            "data.mixture[0].path",
        ),
        ("validation: {kind: tokens, path: none.npy}", "SW1301", "validation.path"),
        ("launch: {hostfile: host}", "SW1301", "launch.hostfile"),
        ("launch: {setup_script: env.sh}", "SW1301", "launch.setup_script"),
        ("source: ./none", "SW1301", "does not exist"),
        ("source: ./hosts", "SW1301", "is a file"),
        ("source: ./corpus", "SW1302", "config.json"),
    ],
)
def test_wrong(line: str, code: str, words: str, folder: Path) -> None:
    (diagnostic,) = found(line, folder)
    assert diagnostic.code == code and words in diagnostic.message and diagnostic.help


def test_the_nearest_name_is_offered(folder: Path) -> None:
    (diagnostic,) = found("data: {kind: tokens, path: goood.npy}", folder)
    assert diagnostic.valid == ("good.npy",)


def test_everything_missing_is_told_at_once(folder: Path) -> None:
    line = "data: {kind: tokens, path: a.npy}\nlaunch: {hostfile: h, setup_script: s}"
    assert len(check_files(load(f"{GOOD}{line}\n", folder))) == 3


def test_a_tokenizer_that_follows_from_a_missing_source_is_not_told_twice(folder: Path) -> None:
    text = GOOD.replace("config: {model_type: llama, hidden_size: 64}", "source: ./none")
    recipe = load(text + "data: {kind: text, path: python-stdlib}\n", folder)
    assert [d.key for d in check_files(recipe)] == [("model", "source")]
