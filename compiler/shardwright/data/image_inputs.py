"""Run the model's own processor: it writes the text that stands for an image, and makes the images'
tensors.

torch and transformers are imported on use. B sequences of a micro-batch, S tokens of each.
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
"""Side of the dummy image (pixels) that the vision encoder gets in a micro-batch without images."""


T = TypeVar("T")


def load_or_refuse(load: Callable[[Path], T], folder: Path) -> T:
    """Load the files of a processor in `folder`. Raises SW6133."""
    from shardwright.models.image_processor import ProcessorUnavailable

    try:
        return load(folder)
    except ProcessorUnavailable as error:
        raise refusal(
            "SW6133",
            f"the processor in {str(folder)!r} cannot be used: {error}",
            (
                "Install the package that it names, or compile again with a model whose processor "
                "transformers has."
            ),
        ) from None


class ImageProcessor:
    """Hold the processor in `folder`. Raises SW6133.

    takes: inputs of the model's forward; None where only texts are needed.
    token: the text that stands for an image.
    template: the processor's own chat template.
    skip_decoding: whether to use blank images, for a later stage that needs only sizes and places.
    decoders: processes that decode images; None decodes in this process.
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
        # Some types split an image into tiles only where it is the only one of its sequence.
        self._tiles_per_sequence = "batch_num_images" in getattr(
            self._processor.image_processor, "model_input_names", ()
        )

    def expand(
        self, text: str, spans: list[Span], pictures: Sequence[ImageSource]
    ) -> tuple[str, list[Span]] | None:
        """Return the text with each placeholder expanded for its image, and the moved spans.

        None where the numbers of placeholders and images differ.
        """
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
        """Return whether two adjacent images would count as one: the type finds images by runs of
        placeholders."""
        names = getattr(self._processor.image_processor, "model_input_names", ())
        return "image_grid_thw" in names and self.token * 2 in text

    def inputs(
        self,
        tokens: npt.NDArray[np.int64],
        loss_mask: npt.NDArray[np.bool_] | None,
        rows: Sequence[Sequence[ImageSource]],
    ) -> dict[str, torch.Tensor]:
        """Return the forward's inputs beside the ids (B, S). Raises SW6132."""
        import torch

        inputs = self.ready(rows) if any(rows) else {}
        places = torch.from_numpy(np.isin(tokens, self._processor.image_token_ids).astype(np.int64))
        for name in ("mm_token_type_ids", "token_type_ids"):
            if self._takes is not None and name in self._takes:
                # If the processor marks no images, 0 marks the prefix with full attention.
                if name == "mm_token_type_ids" or getattr(
                    self._processor, "return_mm_token_type_ids", False
                ):
                    inputs[name] = places
                    continue
                labels = np.ones(tokens.shape, np.int64) if loss_mask is None else loss_mask
                # 1 from the first label on: in the prefix, a question would attend to its answer
                # through the tokens after it.
                suffix = np.maximum.accumulate(labels.astype(np.int64), axis=1)
                inputs[name] = torch.from_numpy(suffix)
        return inputs

    def ready(self, rows: Sequence[Sequence[ImageSource]]) -> dict[str, torch.Tensor]:
        """Return the tensors of the sequences' images, decoded. Raises SW6132."""
        from PIL import Image

        most = self.images.max_pixels
        pictures = [picture for row in rows for picture in row]
        if self.skip_decoding:
            sizes = [fit_within_pixels(p.width, p.height, most) for p in pictures]
            images = [Image.new("RGB", size) for size in sizes]
        elif self.decoders is None:
            images = [decode(p, most) for p in pictures]
        else:
            images = self.decoders.decode(pictures, most)
        if not self._tiles_per_sequence:
            return self._of_images(images)
        left = iter(images)
        return self._of_images([[next(left) for _ in row] for row in rows if row])

    @functools.cached_property
    def blank(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the dummy image."""
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
        processed: tuple[Any, list[str]] = self._processor._process_images(images, **self._options)
        return processed


def _moved(place: int, moves: list[tuple[int, int]]) -> int:
    """Return where a place of the text moves to.

    moves: (end of a placeholder, characters that it grows by).
    """
    return place + sum(more for end, more in moves if place >= end)
