"""Into how many tiles a type's processor cuts a picture: asked of the processor itself, on pictures
of one colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from shardwright.models.image_processor import ProcessorUnavailable, image_processor_arguments
from shardwright.models.tasks.image_formats import VisionEncoderShape
from shardwright.utils.exception_summary import exception_summary

SIDES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (4, 3), (3, 4), (1, 4), (4, 1), (1, 12), (12, 1))
"""Of a picture, in sides of the tower's own: where a processor cuts by area, by proportions or by a
list of sizes."""


def tile_counts(processor: Any, tower: VisionEncoderShape) -> list[tuple[int, int]]:
    """Of pictures of several sizes: (tiles, the whole one among them; tokens of a row that stand
    for them). tower: whose pictures have one size. Raises ProcessorUnavailable."""
    found = []
    options = image_processor_arguments(processor)
    for image in _pictures(tower):
        made, written = _called(processor._process_images, image, options)
        found.append((_tiles(made, tower), str(written[0]).count(processor.image_token)))
    return found


def max_tiles(images: Any, options: dict[str, Any], tower: VisionEncoderShape) -> int:
    """images: a processor's part for pictures; options: that it is called with. Raises
    ProcessorUnavailable."""
    options = {**options, "return_tensors": "pt"}
    return max(_tiles(_called(images, image, options), tower) for image in _pictures(tower))


def _called(processor: Callable[..., Any], image: Image.Image, options: dict[str, Any]) -> Any:
    try:
        return processor([image], **options)
    except Exception as error:  # whatever a type's own class raises at this size
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def _pictures(tower: VisionEncoderShape) -> Iterator[Image.Image]:
    yield from (Image.new("RGB", (a * tower.side, b * tower.side)) for a, b in SIDES)


def _tiles(made: Any, tower: VisionEncoderShape) -> int:
    return max(1, int(made["pixel_values"].numel()) // (tower.channels * tower.side**2))
