"""Into how many tiles a type's processor cuts a picture: asked of the processor itself, on pictures
of one colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from shardwright.models.image_processor import NoProcessor, options_of
from shardwright.models.tasks.image_formats import Tower
from shardwright.utils.exception_summary import first_line

SIDES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (4, 3), (3, 4), (1, 4), (4, 1), (1, 12), (12, 1))
"""Of a picture, in sides of the tower's own: where a processor cuts by area, by proportions or by a
list of sizes."""


def cuts(processor: Any, tower: Tower) -> list[tuple[int, int]]:
    """Of pictures of several sizes: (tiles, the whole one among them; tokens of a row that stand
    for them). tower: whose pictures have one size. Raises NoProcessor."""
    found = []
    options = options_of(processor)
    for image in _pictures(tower):
        made, written = _called(processor._process_images, image, options)
        found.append((_tiles(made, tower), str(written[0]).count(processor.image_token)))
    return found


def most_tiles(images: Any, options: dict[str, Any], tower: Tower) -> int:
    """images: a processor's part for pictures; options: that it is called with. Raises
    NoProcessor."""
    options = {**options, "return_tensors": "pt"}
    return max(_tiles(_called(images, image, options), tower) for image in _pictures(tower))


def _called(processor: Callable[..., Any], image: Image.Image, options: dict[str, Any]) -> Any:
    try:
        return processor([image], **options)
    except Exception as error:  # whatever a type's own class raises at this size
        raise NoProcessor(first_line(error, 160)) from None


def _pictures(tower: Tower) -> Iterator[Image.Image]:
    yield from (Image.new("RGB", (a * tower.side, b * tower.side)) for a, b in SIDES)


def _tiles(made: Any, tower: Tower) -> int:
    return max(1, int(made["pixel_values"].numel()) // (tower.channels * tower.side**2))
