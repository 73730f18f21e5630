"""Measures how many images a core of this machine makes ready in a second, and how many cores the
plan's steps want."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.data_preparation import prepared_folder
from shardwright.data.data_sources import data_sections
from shardwright.data.document_packing import open_document_sequences
from shardwright.data.image_captions import ContrastiveProcessor, has_image_captions
from shardwright.data.image_files import ImageSource, ImageTable, open_images
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.indexed_dataset import open_documents
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import DataSection, ImagesSection

TIMED_IMAGES = 32
"""Pictures that are timed, from all over the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageThroughput:
    """Holds images a second. images_per_core_second: that a core decodes and prepares; wanted: that
    all steps, as fast as planned, take. cores: of all hosts together; ranks: of the first pipeline
    stage, which share them out."""

    images_per_core_second: float
    wanted: float
    cores: int
    ranks: int


def image_throughput(plan: Plan, folder: Path) -> ImageThroughput | None:
    """Times some images; None where no sequence has one. folder: compiled and prepared. Errors:
    SW6132, SW6133."""
    seconds, pictures = 0.0, 0.0  # of a row, over the parts of the data
    whole = sum(part.weight for part in data_sections(plan.data))
    for part in data_sections(plan.data):
        here = prepared_folder(part, folder)
        table = open_images(here)
        if table is None or part.images is None:
            continue
        documents = open_documents(here)
        if has_image_captions(part):
            rows = np.arange(len(documents.ends))
        else:
            rows = open_document_sequences(
                here, documents, plan.training.sequence_length, packed=part.packing
            ).members
        held = table.index[np.isin(table.index[:, 0], rows)]
        if not len(held):
            continue
        each = part.weight / whole * len(held) / len(rows)
        pictures += each
        seconds += each * _seconds(
            _processing(part, part.images, folder / str(part.tokenizer)), table, held
        )
    if not pictures:
        return None
    wanted = plan.training.global_batch_size * pictures / plan.predicted.time.step_seconds
    images_per_core_second = pictures / max(seconds, 1e-9)
    ranks = sum(rank.pipeline == 0 for rank in plan.ranks)
    return ImageThroughput(
        images_per_core_second=images_per_core_second,
        wanted=wanted,
        cores=max(1, math.ceil(wanted / images_per_core_second)),
        ranks=ranks,
    )


def _processing(
    part: DataSection, images: ImagesSection, folder: Path
) -> Callable[[ImageSource], object]:
    """Returns what makes tensors of one image, as the ranks do. folder: of the processor."""
    if has_image_captions(part):
        pairs, no_tokens = ContrastiveProcessor(folder, images), np.zeros((1, 0), dtype=np.int64)
        return lambda picture: pairs.inputs(no_tokens, None, [[picture]])
    image_processor = ImageProcessor(folder, images)
    return lambda picture: image_processor.ready([[picture]])


def _seconds(
    process: Callable[[ImageSource], object], table: ImageTable, held: npt.NDArray[np.int64]
) -> float:
    """Returns the seconds that a core takes for one of the images. held: their rows of the table's
    index."""
    sample = held[np.unique(np.linspace(0, len(held) - 1, TIMED_IMAGES).astype(np.int64))]
    found = [
        picture
        for row in sample
        for picture in dataclasses.replace(table, index=row[None]).of(int(row[0]))
    ]
    process(found[0])  # the first one pays for what is imported
    begun = time.process_time()  # a core's seconds, whatever else runs here
    for picture in found:
        process(picture)
    return (time.process_time() - begun) / len(found)
