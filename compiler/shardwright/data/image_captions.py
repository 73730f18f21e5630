"""Read pairs of an image and a caption, write them as prepared data, and read them back as
sequences.

A record has its caption under `data.field` and its image under `image`: a path relative to the
file's folder, or an object with `bytes` or `path`, as in Hugging Face datasets. pairs.json, beside
the tokens, holds the padding id and the number of closing ids, which stay at the end of a cut
caption. torch and transformers are imported on use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwright.data.image_decoder import ImageDecoders
from shardwright.data.image_files import (
    DamagedImage,
    ImageSource,
    ImageTable,
    ImageWriter,
    decode,
    inspect_image,
)
from shardwright.data.image_inputs import load_or_refuse
from shardwright.data.indexed_dataset import Documents, DocumentWriter
from shardwright.data.sequences import Indices, SequenceBatch
from shardwright.data.source_files import ReadingProgress, RecordCounts, record_text, records
from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.recipe_types import DataSection, ImagesSection
from shardwright.utils.json_values import JsonObject

if TYPE_CHECKING:
    import torch

IMAGE_KEY = "image"
"""Key of the image in a record."""
PADDING_FILE = "pairs.json"
_CAPTION_BATCH = 256
"""Captions that go to the tokenizer at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionPadding:
    """Hold the ids around a caption.

    fill: padding id.
    closing: number of the tokenizer's own ids at the end of each caption.
    """

    fill: int
    closing: int


class ContrastiveProcessor:
    """Hold the tokenizer and the image processor in `folder`. Raises SW6133.

    decoders: processes that decode images; None decodes in this process.
    """

    def __init__(
        self, folder: Path, images: ImagesSection, *, decoders: ImageDecoders | None = None
    ) -> None:
        from shardwright.models.image_processor import load_pair_processor

        self._tokenizer, self._images = load_or_refuse(load_pair_processor, folder)
        self.images, self.decoders = images, decoders

    @property
    def blank(self) -> None:
        """Return None: every sequence has its image."""

    def ids(self, captions: list[str]) -> list[list[int]]:
        """Return the ids with the tokenizer's own around each caption, neither cut nor padded."""
        ids: list[list[int]] = self._tokenizer(
            captions, verbose=False, padding=False, truncation=False
        )["input_ids"]
        return ids

    @property
    def padding(self) -> CaptionPadding:
        special, ids = set(self._tokenizer.all_special_ids), self.ids(["a"])[0]
        closing = next(
            (n for n, token in enumerate(reversed(ids)) if token not in special), len(ids)
        )
        fill = self._tokenizer.pad_token_id
        return CaptionPadding(fill=ids[-1] if fill is None else int(fill), closing=closing)

    def inputs(
        self,
        tokens: npt.NDArray[np.int64],
        loss_mask: npt.NDArray[np.bool_] | None,
        rows: Sequence[Sequence[ImageSource]],
    ) -> dict[str, torch.Tensor]:
        """Return the forward's inputs beside the ids (B, S). Raises SW6132."""
        most, flat = self.images.max_pixels, [picture for row in rows for picture in row]
        decoded = (
            [decode(p, most) for p in flat]
            if self.decoders is None
            else self.decoders.decode(flat, most)
        )
        return {"pixel_values": self._images(images=decoded, return_tensors="pt")["pixel_values"]}


class ImageCaptionReader:
    """Read one source. Raises SW6110, SW6134, SW6135, SW6138.

    writer, image_writer: writers of the same folder.
    """

    def __init__(
        self,
        part: DataSection,
        processor: ContrastiveProcessor,
        writer: DocumentWriter,
        image_writer: ImageWriter,
        report: RecordCounts,
    ) -> None:
        self.part, self.processor, self.writer, self.image_writer, self.report = (
            part,
            processor,
            writer,
            image_writer,
            report,
        )
        self._records = 0

    def read(self, files: tuple[str, ...], shown: ReadingProgress) -> Iterator[None]:
        """Yield after each batch that is written."""
        batch: list[tuple[str, ImageSource]] = []
        for name in files:
            for record, where, size in records(name, self.report):
                self._records += 1
                pair = None
                try:
                    pair = self._pair(
                        record, where, Path(self.processor.images.folder or Path(name).parent)
                    )
                except Refusal as problem:
                    self.report.skip_record(problem)
                if pair is not None:
                    batch.append(pair)
                shown.add(size)
                if len(batch) == _CAPTION_BATCH:
                    self._write(batch)
                    batch = []
                    yield
        self._write(batch)
        (self.writer.folder / PADDING_FILE).write_text(
            json.dumps(asdict(self.processor.padding)), encoding="utf-8"
        )
        yield
        self.image_writer.check_damaged(self.part.skip_damaged, self._records, "pairs")

    def _pair(self, record: JsonObject, where: str, folder: Path) -> tuple[str, ImageSource] | None:
        """Return (caption, image), None where the image is damaged."""
        caption, source = record_text(record, where, self.part.field), record.get(IMAGE_KEY)
        if source is None:
            raise refusal(
                "SW6138",
                f"{where}: there is no image under {IMAGE_KEY!r}",
                f"Set {IMAGE_KEY!r} to a path relative to the file's folder, or to an object "
                "with `bytes`.",
            )
        try:
            return caption, inspect_image(source, folder)
        except DamagedImage as why:
            self.image_writer.damaged(f"{where}: {why}")
            if not self.part.skip_damaged:
                self.image_writer.check_damaged(0, self._records, "pairs")
            return None

    def _write(self, batch: list[tuple[str, ImageSource]]) -> None:
        for ids, (_, picture) in zip(
            self.processor.ids([c for c, _ in batch]) if batch else [], batch, strict=True
        ):
            number = self.writer.documents
            self.writer.add(np.asarray(ids, dtype=np.int32))
            if self.writer.documents > number:
                self.image_writer.add(number, [picture])


@dataclass(frozen=True, slots=True)
class CaptionSequences:
    """Read one caption per sequence, cut at S before its closing ids, or padded.

    pictures: one image per caption.
    """

    documents: Documents
    length: int
    padding: CaptionPadding
    pictures: ImageTable

    def __len__(self) -> int:
        return len(self.documents.ends)

    def read(self, indices: Indices) -> SequenceBatch:
        d, closing = self.documents, self.padding.closing
        tokens = np.full((len(indices), self.length), self.padding.fill, dtype=np.int64)
        for row, i in enumerate(indices):
            ids = d.tokens[int(d.ends[i - 1]) if i else 0 : int(d.ends[i])]
            size = min(len(ids), self.length)
            tokens[row, :size] = ids[:size]
            if size < len(ids) and closing:
                tokens[row, size - closing :] = ids[len(ids) - closing :]
        pictures = tuple(self.pictures.of(int(i)) for i in indices)
        return SequenceBatch(tokens=tokens, pictures=pictures)


def has_image_captions(part: DataSection) -> bool:
    """Return whether a source holds captions with one image each; conversations with images are of
    kind chat."""
    return part.images is not None and part.kind != "chat"
