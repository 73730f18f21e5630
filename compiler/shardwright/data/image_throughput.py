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
from shardwright.data.data_sources import parts_of
from shardwright.data.document_packing import whole_rows
from shardwright.data.image_captions import PairSight, is_of_pairs
from shardwright.data.image_files import Picture, PictureTable, open_pictures
from shardwright.data.image_inputs import Sight
from shardwright.data.indexed_dataset import open_documents
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import DataSection, ImagesSection

SAMPLE = 32
"""Pictures that are timed, from all over the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRate:
    """Holds images a second. per_core: that a core decodes and prepares; wanted: that all steps, as
    fast as planned, take. cores: of all hosts together; ranks: of the first pipeline stage, which
    share them out."""

    per_core: float
    wanted: float
    cores: int
    ranks: int


def picture_rate(plan: Plan, folder: Path) -> PictureRate | None:
    """Times some images; None where no sequence has one. folder: compiled and prepared. Errors:
    SW6132, SW6133."""
    seconds, pictures = 0.0, 0.0  # of a row, over the parts of the data
    whole = sum(part.weight for part in parts_of(plan.data))
    for part in parts_of(plan.data):
        here = prepared_folder(part, folder)
        table = open_pictures(here)
        if table is None or part.images is None:
            continue
        documents = open_documents(here)
        if is_of_pairs(part):
            rows = np.arange(len(documents.ends))
        else:
            rows = whole_rows(
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
    per_core = pictures / max(seconds, 1e-9)
    ranks = sum(rank.pipeline == 0 for rank in plan.ranks)
    return PictureRate(
        per_core=per_core, wanted=wanted, cores=max(1, math.ceil(wanted / per_core)), ranks=ranks
    )


def _processing(
    part: DataSection, images: ImagesSection, folder: Path
) -> Callable[[Picture], object]:
    """Returns what makes tensors of one image, as the ranks do. folder: of the processor."""
    if is_of_pairs(part):
        pairs, no_tokens = PairSight(folder, images), np.zeros((1, 0), dtype=np.int64)
        return lambda picture: pairs.inputs(no_tokens, None, [[picture]])
    sight = Sight(folder, images)
    return lambda picture: sight.ready([[picture]])


def _seconds(
    process: Callable[[Picture], object], table: PictureTable, held: npt.NDArray[np.int64]
) -> float:
    """Returns the seconds that a core takes for one of the images. held: their rows of the table's
    index."""
    sample = held[np.unique(np.linspace(0, len(held) - 1, SAMPLE).astype(np.int64))]
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
