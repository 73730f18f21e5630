"""What `data.images` says is settled: where pictures lie is told from the recipe, also in a part of
a mixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import ImagesSection
from tests.parity.vision_language import VlmCase, recipe


def images(tmp_path: Path, data: dict[str, Any]) -> list[ImagesSection | None]:
    document = {**recipe(VlmCase("llava")), "data": data}
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    return [part.images for _, part in load_recipe(tmp_path / "recipe.json").dataset_sections()]


def test_a_folder_of_pictures_is_relative_to_the_recipe(tmp_path: Path) -> None:
    plain = recipe(VlmCase("llava"))["data"]
    inside = {**plain, "images": {**plain["images"], "folder": "../coco"}}
    wanted = ImagesSection(per_row=2, max_pixels=1600, folder=str(tmp_path.parent / "coco"))
    assert images(tmp_path, inside) == [wanted]
    assert images(tmp_path, plain) == [ImagesSection(per_row=2, max_pixels=1600)]
    parts = {k: v for k, v in inside.items() if k not in ("packing", "shuffle")}
    mixture = {"mixture": [{**parts, "weight": 1.0, "packing": False}, {**plain, "weight": 1.0}]}
    assert images(tmp_path, mixture) == [wanted, ImagesSection(per_row=2, max_pixels=1600)]
