"""Reads rows of exactly S token ids by number. B: rows asked for; S: training.sequence_length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardwright.data.image_files import ImageSource, ImageTable
from shardwright.data.indexed_dataset import Documents

Indices = npt.NDArray[np.int64]
PADDING_ID = 0
"""Any id does: it is no label, comes behind what is read, and stands apart where documents are
packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """Holds rows. tokens: (B, S) ids. starts: (B, S) bool, True where a document begins; None where
    rows are whole.

    trained: (B, S) bool, False where a token is no label; None where all are. pictures: of each
    row, in the order of their placeholders; () where the data has none. lengths: (B,) tokens of
    each row before its padding; None where no row is padded.
    """

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.bool_] | None
    trained: npt.NDArray[np.bool_] | None
    pictures: tuple[tuple[ImageSource, ...], ...] = ()
    lengths: npt.NDArray[np.int64] | None = None


class SequenceDataset(Protocol):
    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> SequenceBatch: ...


@dataclass(frozen=True, slots=True)
class ArraySequences:
    """Reads rows of an array. tokens: (n, S)."""

    tokens: npt.NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: Indices) -> SequenceBatch:
        return SequenceBatch(tokens=self.tokens[indices], starts=None, trained=None)


@dataclass(frozen=True, slots=True)
class ChunkedSequences:
    """Cuts one stream of documents every S tokens; the rest behind the last whole row is left out.

    packed: a document's parts on two rows are documents of their own.
    """

    documents: Documents
    length: int
    packed: bool

    def __len__(self) -> int:
        return len(self.documents.tokens) // self.length

    def read(self, indices: Indices) -> SequenceBatch:
        size, tokens, ends = self.length, self.documents.tokens, self.documents.ends
        cut = np.stack([tokens[i * size : (i + 1) * size] for i in indices])
        if not self.packed:
            return SequenceBatch(tokens=cut, starts=None, trained=None)
        starts = np.zeros(cut.shape, dtype=np.bool_)
        for row, i in enumerate(indices):
            first, last = np.searchsorted(ends, (i * size, (i + 1) * size))
            starts[row, ends[first:last] - i * size] = True  # where one ends, the next begins
            starts[row, 0] |= i == 0
        return SequenceBatch(tokens=cut, starts=starts, trained=None)


@dataclass(frozen=True, slots=True)
class DocumentSequences:
    """Reads whole documents, several a row where they are packed, padded behind and cut at S.

    members: numbers of the documents, row by row; bounds: (n + 1,) where each row begins in them.
    pictures: of the documents; None where they have none.
    """

    documents: Documents
    length: int
    packed: bool
    members: Indices
    bounds: Indices
    pictures: ImageTable | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def read(self, indices: Indices) -> SequenceBatch:
        d, shape = self.documents, (len(indices), self.length)
        tokens = np.full(shape, PADDING_ID, dtype=d.tokens.dtype)
        starts, trained = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        lengths = np.zeros(len(indices), dtype=np.int64)
        for row, i in enumerate(indices):
            at = 0
            for document in self.members[self.bounds[i] : self.bounds[i + 1]]:
                first = int(d.ends[document - 1]) if document else 0
                size = min(int(d.ends[document]) - first, self.length)
                tokens[row, at : at + size] = d.tokens[first : first + size]
                trained[row, at : at + size] = (
                    True if d.trained is None else d.trained[first : first + size]
                )
                starts[row, at] = True
                at += size
            lengths[row] = at
            if at < self.length:
                starts[row, at] = True  # the padding sees itself alone
        return SequenceBatch(
            tokens=tokens,
            starts=starts if self.packed else None,
            trained=trained,
            pictures=self._pictures(indices),
            lengths=lengths,
        )

    def _pictures(self, indices: Indices) -> tuple[tuple[ImageSource, ...], ...]:
        table = self.pictures
        if table is None:
            return ()
        members = (self.members[self.bounds[i] : self.bounds[i + 1]].tolist() for i in indices)
        return tuple(tuple(p for document in row for p in table.of(document)) for row in members)


@dataclass(frozen=True, slots=True)
class SubsetSequences:
    """Reads those of `rows` whose numbers are in `chosen`."""

    rows: SequenceDataset
    chosen: Indices

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Indices) -> SequenceBatch:
        return self.rows.read(self.chosen[indices])


@dataclass(frozen=True, slots=True)
class ConcatSequences:
    """Reads the rows of several parts, numbered one part behind the other."""

    parts: Sequence[SequenceDataset]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def read(self, indices: Indices) -> SequenceBatch:
        firsts = np.cumsum([0, *(len(part) for part in self.parts)])
        owner = np.searchsorted(firsts, indices, side="right") - 1
        blocks = [
            (owner == p, self.parts[p].read(indices[owner == p] - firsts[p]))
            for p in np.unique(owner)
        ]
        shape = (len(indices), blocks[0][1].tokens.shape[1])
        tokens = np.empty(shape, dtype=np.int64)
        starts, trained = np.zeros(shape, dtype=np.bool_), np.ones(shape, dtype=np.bool_)
        pictures: list[tuple[ImageSource, ...]] = [()] * len(indices)
        lengths = np.full(len(indices), shape[1], dtype=np.int64)
        for where, block in blocks:
            for row, own in zip(np.flatnonzero(where), block.pictures, strict=bool(block.pictures)):
                pictures[row] = own
            tokens[where] = block.tokens
            if block.starts is not None:
                starts[where] = block.starts
            if block.trained is not None:
                trained[where] = block.trained
            if block.lengths is not None:
                lengths[where] = block.lengths
        packed = any(block.starts is not None for _, block in blocks)
        masked = any(block.trained is not None for _, block in blocks)
        shown = tuple(pictures) if any(block.pictures for _, block in blocks) else ()
        return SequenceBatch(
            tokens=tokens,
            starts=starts if packed else None,
            trained=trained if masked else None,
            pictures=shown,
            lengths=lengths if any(block.lengths is not None for _, block in blocks) else None,
        )
