"""The pictures behind `path: drawn-shapes`: the same on every machine, and as many of each
shape."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.data.data_sources import made_folder, matching_files
from shardwright.data.image_files import extract_images, inspect_image
from shardwright.data.shapes_dataset import SHAPES, SIDE, draw, draw_shapes
from shardwright.recipe.input_file_checks import check_files
from shardwright.recipe.recipe_loader import load_recipe

ROOT = Path(__file__).parents[3]


def test_the_same_seed_draws_the_same_and_another_does_not(tmp_path: Path) -> None:
    folders = [(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    contents = []
    for folder, seed in folders:
        assert draw_shapes(folder, 8, seed) == folder / "data.jsonl"
        contents.append([path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()])
    assert contents[0] == contents[1] != contents[2]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}, (
        "nothing half-drawn is left"
    )


def test_each_record_names_what_its_picture_shows(tmp_path: Path) -> None:
    lines = draw_shapes(tmp_path / "shapes", 12).read_text("utf-8").splitlines()
    said = Counter[str]()
    for line in lines:
        messages = json.loads(line)["messages"]
        _, (source,) = extract_images(None, messages, "data.jsonl")
        picture = inspect_image(source, tmp_path / "shapes")
        assert (picture.width, picture.height) == (SIDE, SIDE)
        shape = messages[1]["content"][0]["text"]
        assert Path(str(picture.path)).stem.endswith(shape)
        said[shape] += 1
    assert said == dict.fromkeys(SHAPES, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_lies_whole_in_its_picture(shape: str) -> None:
    for seed in range(50):
        image = draw(shape, random.Random(seed))
        left, top, right, bottom = image.getbbox() or (0, 0, 0, 0)
        assert 0 < left < right < SIDE and 0 < top < bottom < SIDE, seed
        share = image.convert("1").histogram()[255] / ((right - left) * (bottom - top))
        assert (share > 0.98) == (shape == "square"), (seed, share)


def test_what_is_drawn_already_stays(tmp_path: Path) -> None:
    written = draw_shapes(tmp_path / "shapes", 4)
    before = written.stat().st_mtime_ns
    assert draw_shapes(tmp_path / "shapes", 8).stat().st_mtime_ns == before
    assert len(list((tmp_path / "shapes" / "pictures").iterdir())) == 4


def test_the_recipe_needs_no_file(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny-vision-cpu.yaml")
    assert recipe.data is not None and recipe.data.path == "drawn-shapes"
    assert not check_files(recipe)
    assert matching_files("drawn-shapes", tmp_path) == []
    draw_shapes(made_folder("drawn-shapes", tmp_path), 4)
    assert matching_files("drawn-shapes", tmp_path) == [
        str(made_folder("drawn-shapes", tmp_path) / "data.jsonl")
    ]


def test_other_kinds_look_for_a_file_of_that_name(write_recipe: Callable[..., Path]) -> None:
    data = {"kind": "text", "path": "drawn-shapes", "tokenizer": "byte"}
    (missing,) = check_files(load_recipe(write_recipe({"data": data})))
    assert missing.key == ("data", "path") and str(missing.message).count("drawn-shapes") == 1
