"""cluster.measured: read strictly, a part of the recipe's hash, and a copy in the compiled
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.compiled_folder import read_folder, write_folder
from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import canonical_hash
from tests.unit.calibrate.measurement_files import figure, measurements, write
from tests.unit.models.factory import SMALL_LLAMA


def recipe_file(folder: Path, measured: object, **cluster: Any) -> Path:
    document: dict[str, Any] = {
        "version": 1,
        "name": "measured",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu", **cluster},
        "training": {
            "sequence_length": 128,
            "global_batch_size": 8,
            "steps": 2,
            "precision": "fp32",
            "optimizer": {"lr": 1e-3},
        },
        "data": {"kind": "synthetic"},
    }
    if measured is not None:
        document["cluster"]["measured"] = measured
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    return path


def load(folder: Path, measured: object, **cluster: Any) -> Recipe:
    return load_recipe(recipe_file(folder, measured, **cluster))


def refused(folder: Path, measured: object) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        load(folder, measured)
    (found,) = caught.value.diagnostics
    assert found.key == ("cluster", "measured") and found.help and caught.value.source is not None
    return found.code, found.message


def test_what_the_file_says_is_read_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path / "m.json", measurements())
    found = load(tmp_path, "m.json").cluster.measured
    assert (
        found is not None
        and found.found == measurements()
        and found.path == str(tmp_path / "m.json")
    )
    assert load(tmp_path, None).cluster.measured is None
    assert load(tmp_path, "./m.json").document == load(tmp_path, str(tmp_path / "m.json")).document


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected `object`, got `array`"),
        ('{"kind": "shardwright measurements"}', "missing required field `version`"),
    ],
)
def test_no_measurements(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "m.json").write_text(text)
    code, message = refused(tmp_path, "m.json")
    assert code == "SW1302" and why in message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "version: invalid enum value 2"),
        ({"more": 1}, "'more'"),
        (
            {"constants": {"tile_seconds": {"value": "1", "n": 1, "spread": 0}}},
            "constants[...].value: expected `float`, got `str`",
        ),
        (
            {"constants": {"tile_seconds": {"value": float("nan"), "n": 1, "spread": 0}}},
            "constants.tile_seconds.value is nan",
        ),
        (
            {"constants": {"tile_seconds": {"value": -1, "n": 1, "spread": 0}}},
            "constants.tile_seconds.value is -1",
        ),
        (
            {"constants": {"tile_seconds": {"value": 1, "n": 0, "spread": 0}}},
            "constants.tile_seconds.n is 0",
        ),
        ({"sequence_length": 0}, "sequence_length is not above 0"),
    ],
)
def test_what_no_measurement_gives(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    write(tmp_path / "m.json", measurements(), **changes)
    code, message = refused(tmp_path, "m.json")
    assert code == "SW1302" and why in message, message


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refused(tmp_path, "absent.json")[0] == "SW1301"
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path, "folder")[0] == "SW1302"


def test_a_digest_holds_the_file_to_what_it_was(tmp_path: Path) -> None:
    write(tmp_path / "m.json", measurements())
    before = load(tmp_path, "m.json")
    assert before.cluster.measured is not None
    pinned = {"file": "m.json", "sha256": before.cluster.measured.sha256}
    assert load(tmp_path, pinned).document == before.document
    write(tmp_path / "m.json", measurements(constants={"memory_efficiency": figure(0.6)}))
    assert refused(tmp_path, pinned)[0] == "SW1303"
    after = load(tmp_path, "m.json")
    assert canonical_hash(after.document) != canonical_hash(before.document)


def test_without_the_key_and_with_null_the_recipe_is_the_same(tmp_path: Path) -> None:
    plain = load(tmp_path, None)
    path = recipe_file(tmp_path, None)
    document = json.loads(path.read_text())
    document["cluster"]["measured"] = None
    path.write_text(json.dumps(document))
    assert load_recipe(path).document == plain.document


def test_a_recipe_that_extends_another_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "m.json", measurements())
    recipe_file(tmp_path / "base", "m.json")
    (tmp_path / "own.json").write_text(json.dumps({"extends": "base/recipe.json", "name": "own"}))
    found = load_recipe(tmp_path / "own.json").cluster.measured
    assert found is not None and found.path == str(tmp_path / "base" / "m.json")


def test_the_compiled_folder_has_a_copy_and_is_priced_by_it(tmp_path: Path) -> None:
    write(tmp_path / "m.json", measurements())
    recipe = load(tmp_path, "m.json")
    compiled = compile_recipe(recipe)
    write_folder(tmp_path / "out", compiled.files)
    assert recipe.cluster.measured is not None
    assert (tmp_path / "out" / "measured.json").read_bytes() == recipe.cluster.measured.content
    (tmp_path / "m.json").unlink()  # the folder needs nothing of where it came from
    folder = read_folder(tmp_path / "out")
    assert not folder.has_stale_prediction and folder.recipe.cluster.measured is not None
    (tmp_path / "out" / "measured.json").write_bytes(recipe.cluster.measured.content + b" ")
    with pytest.raises(Refusal) as caught:
        read_folder(tmp_path / "out")
    assert caught.value.diagnostics[0].code == "SW1303"
    write_folder(tmp_path / "out", compile_recipe(load(tmp_path, None)).files)
    assert not (tmp_path / "out" / "measured.json").exists()


@pytest.mark.parametrize(
    ("found", "cluster", "why"),
    [
        (measurements(), {"gpu": "h100-sxm-80gb"}, "of a CPU"),
        (
            measurements(constants={"speed_of_light": figure(3e8)}),
            {},
            "whose constant speed_of_light this one lacks",
        ),
        (
            measurements(constants={"memory_efficiency": figure(0.0)}),
            {},
            "memory_efficiency that is not above 0",
        ),
    ],
)
def test_figures_of_another_machine_or_version(
    tmp_path: Path, found: Any, cluster: dict[str, Any], why: str
) -> None:
    write(tmp_path / "m.json", found)
    recipe = load(tmp_path, "m.json", **cluster)
    for command in (estimate_recipe, compile_recipe):
        with pytest.raises(Refusal) as caught:
            command(recipe)
        (wrong,) = [d for d in caught.value.diagnostics if d.key == ("cluster", "measured")]
        assert wrong.code == "SW1303" and why in wrong.message
