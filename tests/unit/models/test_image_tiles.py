"""Pictures that a processor cuts into tiles: what the planner counts is what the type's own
processor makes."""

from __future__ import annotations

import ast
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig

from shardwright.cost.vision_encoder_flops import largest_image_sequence
from shardwright.data.image_files import ImageSource
from shardwright.data.image_inputs import ImageProcessor
from shardwright.diagnostics import Refusal
from shardwright.models import image_processor
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.image_processor import (
    default_image_processor,
    load_processor,
    max_tiles,
    processor_files,
    processor_from_config,
    tile_counts,
    with_usual_tiles,
)
from shardwright.models.model_graph import VisionEncoder
from shardwright.models.tasks.vision_language import vision_encoder_shape
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import ImagesSection
from tests.parity.vision_language import MODELS, TEXT, TOWER, VlmCase, recipe, write_cutting
from tests.unit.models.factory import model_section

SIDE = TOWER["image_size"]
LLAMA = {"model_type": "llama", **TEXT}
CLIP = {"model_type": "clip_vision_model", **TOWER, "projection_dim": 32}
PAIRS = [[SIDE * a, SIDE * b] for a in range(1, 7) for b in range(1, 7)]
CUTTING: dict[str, dict[str, Any]] = {
    "llava_next": {
        "image_token_index": 256,
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
        "vision_config": CLIP,
        "text_config": LLAMA,
    },
    "llava_onevision": {
        "image_token_id": 256,
        "image_grid_pinpoints": PAIRS,
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "text_config": {"model_type": "qwen2", **TEXT},
    },
}
SIZES = ((16, 16), (40, 20), (17, 33), (60, 44), (8, 90), (120, 10), (64, 64), (100, 75))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def made(model_type: str, document: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **document)


def folder_of(model_type: str, tmp_path: Path) -> Path:
    if model_type == "smolvlm":
        return write_cutting(tmp_path / "cutting")
    config = made(model_type, CUTTING[model_type])
    for name, content in processor_files(processor_from_config(config), config).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("model_type", [*CUTTING, "smolvlm"])
def test_a_row_holds_what_the_processor_writes(model_type: str, tmp_path: Path) -> None:
    """Text and tensors of each size, alone and two together, against the processor's own call."""
    folder = folder_of(model_type, tmp_path)
    processor = load_processor(folder)
    ours = ImageProcessor(folder, ImagesSection(per_row=2, max_pixels=10**6))
    bounds = tile_counts(
        processor,
        vision_encoder_shape(made(model_type, CUTTING.get(model_type, MODELS["smolvlm"]))),
    )
    most, per_token = max(t for t, _ in bounds), max(t / n for t, n in bounds)
    for sizes in [*((size,) for size in SIZES), *itertools.pairwise(SIZES)]:
        images = [Image.new("RGB", size) for size in sizes]
        pictures = [
            ImageSource(path=None, data=png(image), width=image.width, height=image.height)
            for image in images
        ]
        text = f"a{ours.token * len(sizes)}b"
        written = ours.expand(text, [], pictures)
        assert written is not None
        wanted = processor(text=[text], images=[images], return_tensors="pt")
        assert processor.tokenizer(written[0])["input_ids"] == wanted["input_ids"][0].tolist()
        found = ours.ready([pictures])
        assert found["pixel_values"].equal(wanted["pixel_values"])
        tiles = found["pixel_values"].numel() // (3 * SIDE**2)
        assert tiles <= most * len(sizes)
        if len(sizes) == 1:
            tokens = written[0].count(ours.token)
            assert tiles <= tokens * per_token * 1.01


@pytest.mark.parametrize(("model_type", "tiles"), [("llava_next", 5), ("llava_onevision", 37)])
def test_a_configuration_of_a_recipe_is_cut_by_its_own_sizes(model_type: str, tiles: int) -> None:
    config = made(model_type, CUTTING[model_type])
    processor = processor_from_config(config)
    assert (
        processor.image_processor.image_grid_pinpoints
        == CUTTING[model_type]["image_grid_pinpoints"]
    )
    assert max(t for t, _ in tile_counts(processor, vision_encoder_shape(config))) == tiles


REAL: dict[str, tuple[dict[str, Any], int]] = {
    "idefics3": ({"vision_config": {**TOWER}, "text_config": LLAMA, "image_token_id": 256}, 17),
    "internvl": ({"vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}}, 13),
    "llava_next": (CUTTING["llava_next"], 5),
    "gemma3": (MODELS["gemma3"], 1),
}


@pytest.mark.parametrize("model_type", REAL)
def test_a_model_from_the_hub_is_cut_as_its_type_does_it(model_type: str) -> None:
    """Until its own processor is on this machine."""
    document, tiles = REAL[model_type]
    config = made(model_type, document)
    assert max_tiles(*default_image_processor(config), vision_encoder_shape(config)) == tiles
    whole = VisionEncoder(
        patch=4, patches=16, patches_per_token=4.0, layers=(), tower=(), projector=()
    )
    assert with_usual_tiles(whole, config, inline=False).tiles == tiles


def test_a_models_own_processor_decides(tmp_path: Path) -> None:
    folder = write_cutting(tmp_path / "cutting")
    section = model_section(source=str(folder), task="image-text-to-text")
    found = build_model_graph(section).vision
    assert found is not None and (found.tiles, found.patches) == (5, 16)
    settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**settings, "do_image_splitting": False})
    )
    found = build_model_graph(section).vision
    assert found is not None and (found.tiles, found.patches) == (1, 16)


def test_pictures_are_kept_whole_where_the_recipe_says_so(tmp_path: Path) -> None:
    folder = write_cutting(tmp_path / "cutting")
    picture = [ImageSource(path=None, data=png(Image.new("RGB", (60, 44))), width=60, height=44)]
    tiles = {}
    for cut in (True, False):
        processor = ImageProcessor(folder, ImagesSection(per_row=1, max_pixels=10**6, tiles=cut))
        written = processor.expand(processor.token, [], picture)
        tiles[cut] = processor.ready([picture])["pixel_values"].numel() // (3 * SIDE**2)
        assert written is not None and written[0].count(processor.token) == 4 * tiles[cut]
    assert tiles == {True: 5, False: 1}


def test_a_processor_that_cannot_leave_a_picture_whole_is_told(tmp_path: Path) -> None:
    folder = folder_of("llava_next", tmp_path)
    with pytest.raises(Refusal, match="SW6133") as caught:
        ImageProcessor(folder, ImagesSection(per_row=1, max_pixels=10**6, tiles=False))
    assert "images.tiles" in caught.value.diagnostics[0].message


@pytest.mark.parametrize(("cut", "pictures"), [(True, 10), (False, 2)])
def test_the_largest_row_counts_tiles(cut: bool, pictures: int, tmp_path: Path) -> None:
    document = recipe(VlmCase("smolvlm", tiles=True), write_cutting(tmp_path / "cutting"))
    document["data"]["images"]["tiles"] = cut
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    read = load_recipe(tmp_path / "recipe.json")
    row = largest_image_sequence(read, build_model_graph(read.model))
    assert row is not None and (row.image_count, row.patches) == (pictures, 16)


def test_models_without_images_need_no_pillow() -> None:
    """Pillow is of the extra `vision`: what traces every model imports it where an image is."""
    for path in Path(image_processor.__file__).parents[1].rglob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in statement.names]
                module = getattr(statement, "module", None)
                assert not any(name.startswith("PIL") for name in [module or "", *names]), path
