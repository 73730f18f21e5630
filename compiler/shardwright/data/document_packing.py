"""Decides once which whole conversations share a row, and keeps that beside the tokens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from shardwright.data.image_files import open_images
from shardwright.data.indexed_dataset import Documents
from shardwright.data.sequences import DocumentSequences, Indices


def _paths(folder: Path, length: int, packed: bool) -> tuple[Path, Path]:
    name = f"{length}-{'packed' if packed else 'apart'}"
    return folder / f"members-{name}.npy", folder / f"bounds-{name}.npy"


def write_packing_table(folder: Path, documents: Documents, length: int, *, packed: bool) -> None:
    paths = _paths(folder, length, packed)
    if all(path.exists() for path in paths):
        return
    is_vision_language = open_images(folder) is not None
    for path, array in zip(
        paths, _table(documents, length, packed=packed, whole=is_vision_language), strict=True
    ):
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(temporary, array)
        os.replace(temporary, path)


def open_document_sequences(
    folder: Path, documents: Documents, length: int, *, packed: bool
) -> DocumentSequences:
    paths = _paths(folder, length, packed)
    if not all(path.exists() for path in paths):
        write_packing_table(folder, documents, length, packed=packed)
    members, bounds = (np.load(path, mmap_mode="r") for path in paths)
    return DocumentSequences(documents, length, packed, members, bounds, open_images(folder))


def _table(
    documents: Documents, length: int, *, packed: bool, whole: bool = False
) -> tuple[Indices, Indices]:
    """Documents without a label among their first S tokens teach nothing, and are left out. whole:
    so are those that are longer than S, for a cut might go through a picture."""
    ends, lengths = documents.ends, documents.lengths
    kept = np.flatnonzero((lengths > 1) & ((lengths <= length) | (not whole)))
    if documents.trained is not None:
        trained = documents.trained
        first = np.concatenate([[0], ends[:-1]])
        kept = np.asarray(
            [d for d in kept if trained[first[d] + 1 : min(ends[d], first[d] + length)].any()],
            np.int64,
        )
    if packed:
        return pack(np.minimum(lengths[kept], length), kept, length)
    return kept, np.arange(len(kept) + 1, dtype=np.int64)


def pack(lengths: Indices, documents: Indices, sequence_length: int) -> tuple[Indices, Indices]:
    """Returns (members, bounds) of rows.DocumentSequences. lengths: of `documents`, each 1 to room.

    Best fit decreasing, as in arXiv 2404.10830 (Fewer Truncations Improve Language Modeling): the
    longest first, each into the fullest row that still has room for it. Rows stand in the order of
    their first document, and documents in their own order within a row.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(sequence_length + 1)]  # free tokens -> rows
    spaces = 0  # bit i: some row has i tokens free
    for place in np.argsort(-lengths, kind="stable"):
        size = int(lengths[place])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = sequence_length, len(rows)
            rows.append([])
        rows[row].append(int(documents[place]))
        left = space - size
        if left:
            by_space[left].append(row)
            spaces |= 1 << left
    ordered = sorted(sorted(row) for row in rows)
    return (
        np.asarray([d for row in ordered for d in row], dtype=np.int64),
        np.cumsum([0, *(len(row) for row in ordered)], dtype=np.int64),
    )
