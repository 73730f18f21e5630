"""Runs the model's own processor: it says which text stands for an image, and makes the tensors of
a micro-batch's pictures. torch and transformers are imported where it is made.

B rows of a micro-batch, S tokens of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwright.data.chat_format import Span
from shardwright.data.image_decoder import ImageDecoders
from shardwright.data.image_files import ImageSource, decode, fit_within_pixels
from shardwright.diagnostics import refusal
from shardwright.recipe.recipe_types import ImagesSection

if TYPE_CHECKING:
    import torch

DUMMY_IMAGE_SIDE = 32
"""Pixels of the blank picture's side, which a micro-batch without pictures shows the tower."""


T = TypeVar("T")


def load_or_refuse(load: Callable[[Path], T], folder: Path) -> T:
    """Returns what the files of a processor in `folder` make. Raises Refusal: SW6133."""
    from shardwright.models.image_processor import ProcessorUnavailable

    try:
        return load(folder)
    except ProcessorUnavailable as error:
        raise refusal(
            "SW6133",
            f"the processor in {str(folder)!r} cannot be used: {error}",
            (
                "Install what it names, or compile again with a model whose processor "
                "transformers has."
            ),
        ) from None


class ImageProcessor:
    """Holds the processor in `folder`. takes: names that the model's forward has; None where only
    texts are asked for. token: the text that stands for a picture. template: the processor's own
    chat template.

    skip_decoding: the pictures' values do not matter, and nothing is decoded: a later stage asks
    for sizes and places. decoders: where pictures are decoded; None is here.

    Raises Refusal: SW6133.
    """

    def __init__(
        self,
        folder: Path,
        images: ImagesSection,
        takes: frozenset[str] | None = None,
        *,
        skip_decoding: bool = False,
        decoders: ImageDecoders | None = None,
    ) -> None:
        from shardwright.models.image_processor import image_processor_arguments, load_processor

        self._processor = load_or_refuse(load_processor, folder)
        self._options = load_or_refuse(
            lambda _: image_processor_arguments(self._processor, tiles=images.tiles), folder
        )
        self.images, self._takes = images, takes
        self.skip_decoding, self.decoders = skip_decoding, decoders
        self.token: str = self._processor.image_token
        self.template: str | None = getattr(self._processor, "chat_template", None)
        self._placeholder_text = functools.lru_cache(maxsize=4096)(self._text_of_size)
        # Of a type that cuts a picture into tiles where it is alone in its row, and leaves several
        # whole.
        self._tiles_per_sequence = "batch_num_images" in getattr(
            self._processor.image_processor, "model_input_names", ()
        )

    def expand(
        self, text: str, spans: list[Span], pictures: Sequence[ImageSource]
    ) -> tuple[str, list[Span]] | None:
        """Returns the text with each placeholder written out for its picture, and where the spans
        stand then; None where there are more or fewer placeholders than pictures."""
        pieces = text.split(self.token)
        if len(pieces) != len(pictures) + 1:
            return None
        out, moves, at = [pieces[0]], [], len(pieces[0])
        for piece, picture in zip(pieces[1:], pictures, strict=True):
            size = fit_within_pixels(picture.width, picture.height, self.images.max_pixels)
            written = self._placeholder_text(*size, self._tiles_per_sequence and len(pictures) > 1)
            out += [written, piece]
            moves.append((at + len(self.token), len(written) - len(self.token)))
            at += len(self.token) + len(piece)
        return "".join(out), [(_moved(first, moves), _moved(last, moves)) for first, last in spans]

    def has_adjacent_images(self, text: str) -> bool:
        """Says whether two images stand side by side in it and are one to the type: it finds
        positions (grids of patches) by runs of placeholders."""
        names = getattr(self._processor.image_processor, "model_input_names", ())
        return "image_grid_thw" in names and self.token * 2 in text

    def inputs(
        self,
        tokens: npt.NDArray[np.int64],
        trained: npt.NDArray[np.bool_] | None,
        rows: Sequence[Sequence[ImageSource]],
    ) -> dict[str, torch.Tensor]:
        """Returns what the forward takes beside the ids (B, S). Errors: SW6132."""
        import torch

        found = self.ready(rows) if any(rows) else {}
        places = torch.from_numpy(np.isin(tokens, self._processor.image_token_ids).astype(np.int64))
        for name in ("mm_token_type_ids", "token_type_ids"):
            if self._takes is not None and name in self._takes:
                # Of a type whose processor marks no pictures: its prefix is 0, which sees all of
                # itself.
                marks = name == "mm_token_type_ids" or getattr(
                    self._processor, "return_mm_token_type_ids", False
                )
                found[name] = places if marks else torch.from_numpy(_answer_mask(tokens, trained))
        return found

    def ready(self, rows: Sequence[Sequence[ImageSource]]) -> dict[str, torch.Tensor]:
        """Returns the tensors of the rows' images, decoded. Errors: SW6132."""
        images = self._decoded([picture for row in rows for picture in row])
        if not self._tiles_per_sequence:
            return self._of_images(images)
        left = iter(images)
        return self._of_images([[next(left) for _ in row] for row in rows if row])

    def _decoded(self, pictures: list[ImageSource]) -> list[Any]:
        from PIL import Image

        most = self.images.max_pixels
        if self.skip_decoding:
            return [Image.new("RGB", fit_within_pixels(p.width, p.height, most)) for p in pictures]
        return (
            [decode(p, most) for p in pictures]
            if self.decoders is None
            else self.decoders.decode(pictures, most)
        )

    @functools.cached_property
    def blank(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of a small image of one colour."""
        from PIL import Image

        return self._of_images([Image.new("RGB", (DUMMY_IMAGE_SIDE, DUMMY_IMAGE_SIDE))])

    def _text_of_size(self, width: int, height: int, among_others: bool) -> str:
        from PIL import Image

        image = Image.new("RGB", (width, height))
        _, written = self._process([[image, image]] if among_others else [image])
        return str(written[0])

    def _of_images(self, images: list[Any]) -> dict[str, torch.Tensor]:
        import torch

        made, _ = self._process(images)
        unused = self._processor.unused_input_names
        taken = {n: v for n, v in made.items() if n not in unused and isinstance(v, torch.Tensor)}
        return {n: v for n, v in taken.items() if self._takes is None or n in self._takes}

    def _process(self, images: list[Any]) -> tuple[Any, list[str]]:
        found: tuple[Any, list[str]] = self._processor._process_images(images, **self._options)
        return found


def _answer_mask(
    tokens: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64]:
    """Returns (B, S): 1 from the first token that is learned on. What stands behind an answer has
    seen it: were it part of the prefix, the question would see the answer through it."""
    if trained is None:
        return np.ones(tokens.shape, dtype=np.int64)
    return np.maximum.accumulate(trained.astype(np.int64), axis=1)


def _moved(place: int, moves: list[tuple[int, int]]) -> int:
    """Returns where a place is then. moves: (end of a placeholder in the text, characters that it
    grows by)."""
    return place + sum(more for end, more in moves if place >= end)
