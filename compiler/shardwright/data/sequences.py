"""Read sequences of exactly S token ids by index, and order them. B: sequences read; S:
training.sequence_length."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardwright.data.image_files import ImageSource, ImageTable, open_images
from shardwright.data.indexed_dataset import Documents
from shardwright.recipe.recipe_types import DataSection

Indices = npt.NDArray[np.int64]
DESIRABLE_FILE = "desirable.npy"
"""Holds the labels of completions, one an example of two documents."""
PADDING_ID = 0
"""Fills a sequence. Any id works: padding is not a label, comes last, and is a document of its own
where documents are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """Hold sequences.

    tokens: (B, S) ids.
    starts: (B, S) bool, True where a document starts; None where documents are not packed.
    loss_mask: (B, S) bool, False where a token is not a label; None where all are.
    pictures: images of each sequence, in the order of their placeholders; () without images.
    lengths: (B,) tokens before padding; None where no sequence is padded.
    completions: (B, S) which of its sequence's completions, from 0, each token belongs to; padding
        to the last one. None where pairs are not packed.
    reference: float64 log-probabilities under a reference model, of each sequence (B,), or of
        each completion of packed pairs; None without one.
    desirable: (B,) bool, of labelled completions; None for other data.
    teacher: (B, S, K) int32 ids of a teacher's most probable tokens in each token's place, and
        float32 log-probabilities; None without one.
    """

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.bool_] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None
    pictures: tuple[tuple[ImageSource, ...], ...] = ()
    lengths: npt.NDArray[np.int64] | None = None
    completions: Indices | None = None
    reference: npt.NDArray[np.float64] | None = None
    desirable: npt.NDArray[np.bool_] | None = None
    teacher: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None


class SequenceDataset(Protocol):
    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> SequenceBatch: ...


@dataclass(frozen=True, slots=True)
class ArraySequences:
    """Read rows of an array.

    tokens: (n, S).
    """

    tokens: npt.NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: Indices) -> SequenceBatch:
        return SequenceBatch(tokens=self.tokens[indices])


@dataclass(frozen=True, slots=True)
class ChunkedSequences:
    """Split one stream of documents every S tokens, and drop the remainder.

    packed: whether a document's parts in two sequences are separate documents.
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
            return SequenceBatch(tokens=cut)
        starts = np.zeros(cut.shape, dtype=np.bool_)
        for row, i in enumerate(indices):
            first, last = np.searchsorted(ends, (i * size, (i + 1) * size))
            starts[row, ends[first:last] - i * size] = True  # where one ends, the next starts
            starts[row, 0] |= i == 0
        return SequenceBatch(tokens=cut, starts=starts)


@dataclass(frozen=True, slots=True)
class DocumentSequences:
    """Read complete documents, packed or one per sequence, padded and cut at S.

    members: indices of the documents, sequence by sequence.
    bounds: (n + 1,) start of each sequence in members.
    pictures: images of the documents, None where they have none.
    desirable: of each example of two documents, None where there are no labels.
    together: documents of an example, neighbours in members: 2 of a pair.
    """

    documents: Documents
    length: int
    packed: bool
    members: Indices
    bounds: Indices
    pictures: ImageTable | None = None
    desirable: npt.NDArray[np.bool_] | None = None
    together: int = 1

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def read(self, indices: Indices) -> SequenceBatch:
        d, shape = self.documents, (len(indices), self.length)
        tokens = np.full(shape, PADDING_ID, dtype=d.tokens.dtype)
        starts, loss_mask = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        lengths = np.zeros(len(indices), dtype=np.int64)
        pictures: list[tuple[ImageSource, ...]] = []
        has_pairs = self.packed and self.together > 1
        completions = np.zeros(shape, dtype=np.int64)
        for row, i in enumerate(indices):
            at = 0
            documents = self.members[self.bounds[i] : self.bounds[i + 1]]
            members, sizes = documents.tolist(), self.shown_lengths(documents).tolist()
            if self.pictures is not None:
                images = (self.pictures.of(document) for document in members)
                pictures.append(tuple(itertools.chain.from_iterable(images)))
            for place, (document, size) in enumerate(zip(members, sizes, strict=True)):
                first = int(d.ends[document - 1]) if document else 0
                tokens[row, at : at + size] = d.tokens[first : first + size]
                loss_mask[row, at : at + size] = (
                    True if d.trained is None else d.trained[first : first + size]
                )
                starts[row, at] = True
                completions[row, at:] = place
                at += size
            lengths[row] = at
            if at < self.length:
                starts[row, at] = True  # padding attends only to itself
        return SequenceBatch(
            tokens=tokens,
            starts=starts if self.packed else None,
            loss_mask=loss_mask,
            pictures=tuple(pictures),
            lengths=lengths,
            completions=completions if has_pairs else None,
            desirable=None
            if self.desirable is None
            else self.desirable[self.members[self.bounds[indices]] // 2],
        )

    def shown_lengths(self, documents: Indices) -> Indices:
        """Return the tokens of each document that a sequence holds. documents: pairs whole."""
        return cut_lengths(
            self.documents.ends[documents] - self._firsts(documents),
            self.length,
            self.together if self.packed else 1,
        )

    def _firsts(self, documents: Indices) -> Indices:
        """Return where each document begins among all tokens."""
        before = self.documents.ends[np.maximum(documents - 1, 0)]
        return np.where(documents > 0, before, 0)


@dataclass(frozen=True, slots=True)
class GroupedSequences:
    """Read examples of `size` consecutive sequences each, by the example's index.

    Of n examples, read returns n * size rows, an example's together.
    """

    rows: SequenceDataset
    size: int

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def read(self, indices: Indices) -> SequenceBatch:
        return self.rows.read((indices[:, None] * self.size + np.arange(self.size)).ravel())


@dataclass(frozen=True, slots=True)
class ScoredSequences:
    """Read examples with the reference's log-probabilities of their completions.

    scores: of all examples, in order.
    firsts: (examples + 1,) start of each example in scores.
    """

    rows: SequenceDataset
    scores: npt.NDArray[np.float64]
    firsts: Indices

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Indices) -> SequenceBatch:
        own = [self.scores[self.firsts[i] : self.firsts[i + 1]] for i in indices]
        return replace(self.rows.read(indices), reference=np.concatenate(own))


@dataclass(frozen=True, slots=True)
class SubsetSequences:
    """Read the sequences of `rows` with the indices `chosen`."""

    rows: SequenceDataset
    chosen: Indices

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Indices) -> SequenceBatch:
        return self.rows.read(self.chosen[indices])


@dataclass(frozen=True, slots=True)
class ConcatSequences:
    """Read the sequences of several parts, or their examples, numbered consecutively."""

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
        # An example may have several sequences, as many in all parts.
        each = len(blocks[0][1].tokens) // int(blocks[0][0].sum())
        blocks = [(np.repeat(where, each), block) for where, block in blocks]
        shape = (len(indices) * each, blocks[0][1].tokens.shape[1])
        tokens = np.empty(shape, dtype=np.int64)
        starts, loss_mask = np.zeros(shape, dtype=np.bool_), np.ones(shape, dtype=np.bool_)
        pictures: list[tuple[ImageSource, ...]] = [()] * shape[0]
        lengths = np.full(shape[0], shape[1], dtype=np.int64)
        # All parts have packed pairs, or none has.
        has_pairs = blocks[0][1].completions is not None
        completions = np.zeros(shape, dtype=np.int64) if has_pairs else None
        # All parts have labels, or none has.
        is_labelled = blocks[0][1].desirable is not None
        desirable = np.zeros(shape[0], dtype=np.bool_) if is_labelled else None
        for where, block in blocks:
            if desirable is not None:
                desirable[where] = block.desirable
            if completions is not None:
                completions[where] = block.completions
            for row, own in zip(np.flatnonzero(where), block.pictures, strict=bool(block.pictures)):
                pictures[row] = own
            tokens[where] = block.tokens
            if block.starts is not None:
                starts[where] = block.starts
            if block.loss_mask is not None:
                loss_mask[where] = block.loss_mask
            if block.lengths is not None:
                lengths[where] = block.lengths
        packed = any(block.starts is not None for _, block in blocks)
        masked = any(block.loss_mask is not None for _, block in blocks)
        shown = tuple(pictures) if any(block.pictures for _, block in blocks) else ()
        return SequenceBatch(
            tokens=tokens,
            starts=starts if packed else None,
            loss_mask=loss_mask if masked else None,
            pictures=shown,
            lengths=lengths if any(block.lengths is not None for _, block in blocks) else None,
            completions=completions,
            desirable=desirable,
        )


# The packing table: which conversations share a sequence, decided once and stored beside the
# tokens.


def _paths(folder: Path, length: int, packed: bool) -> tuple[Path, Path]:
    name = f"{length}-{'packed' if packed else 'apart'}"
    return folder / f"members-{name}.npy", folder / f"bounds-{name}.npy"


def write_packing_table(
    folder: Path, documents: Documents, length: int, *, packed: bool, together: int = 1
) -> None:
    """Write (members, bounds) without documents that have no label in what a sequence holds of
    them.

    together: consecutive documents that are left out where one of them is, and packed together
    """
    paths = _paths(folder, length, packed)
    if all(path.exists() for path in paths):
        return
    ends, lengths, trained = documents.ends, documents.lengths, documents.trained
    usable = np.flatnonzero(lengths > 1)
    if open_images(folder) is not None:  # a cut might go through an image
        usable = usable[lengths[usable] <= length]
    if trained is not None:
        first = ends - lengths
        stop = first + cut_lengths(lengths, length, together if packed else 1)
        has_label = [trained[first[d] + 1 : stop[d]].any() for d in usable]
        usable = usable[np.asarray(has_label, dtype=np.bool_)]
    examples, counts = np.unique(usable // together, return_counts=True)
    usable = usable[np.isin(usable // together, examples[counts == together])]
    table = usable, np.arange(len(usable) + 1, dtype=np.int64)
    if packed:
        shown = cut_lengths(lengths[usable], length, together).reshape(-1, together)
        members, bounds = pack(shown.sum(axis=1), usable[::together] // together, length)
        table = (members[:, None] * together + np.arange(together)).ravel(), bounds * together
    for path, array in zip(paths, table, strict=True):
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(temporary, array)
        os.replace(temporary, path)


def open_document_sequences(
    folder: Path, documents: Documents, length: int, part: DataSection
) -> DocumentSequences:
    """Open the prepared documents of `part`, in `folder`, as sequences of `length` tokens."""
    packed = part.joins_documents
    paths = _paths(folder, length, packed)
    if not all(path.exists() for path in paths):
        write_packing_table(
            folder, documents, length, packed=packed, together=part.documents_per_example
        )
    members, bounds = (np.load(path, mmap_mode="r") for path in paths)
    desirable = np.load(folder / DESIRABLE_FILE) if part.labelled else None
    images = open_images(folder)
    return DocumentSequences(
        documents, length, packed, members, bounds, images, desirable, part.documents_per_example
    )


def cut_lengths(lengths: Indices, sequence_length: int, together: int) -> Indices:
    """Return the tokens that remain of each document where `together` consecutive ones, 1 or 2,
    have to fit into a sequence: of a pair each keeps half of it, or what the other leaves."""
    if together == 1:
        return np.minimum(lengths, sequence_length)
    others = lengths.reshape(-1, 2)[:, ::-1].ravel()
    return np.minimum(lengths, np.maximum(sequence_length // 2, sequence_length - others))


def pack(lengths: Indices, documents: Indices, sequence_length: int) -> tuple[Indices, Indices]:
    """Return (members, bounds) for DocumentSequences, packed by best fit decreasing.

    lengths: lengths of `documents`, each from 1 to sequence_length. As in arXiv 2404.10830 (Fewer
        Truncations Improve Language Modeling), the longest document goes first, each into the
        fullest sequence with room for it. Sequences are ordered by their first document.
    """
    rows: list[list[int]] = []
    # Free tokens -> sequences; bit i of spaces: some sequence has i tokens free.
    by_space: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    spaces = 0
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


# The sequences of a step, a function of the seed and the step alone, so that a resumed run
# continues in order.


class EpochShuffle:
    """Order the sequences of one part differently each epoch, or in the file's order."""

    def __init__(self, count: int, seed: Sequence[int], *, shuffle: bool) -> None:
        self.count, self.seed, self.shuffle = count, tuple(seed), shuffle
        self._order: tuple[int, Indices] | None = None

    def epoch(self, number: int) -> Indices:
        if self._order is None or self._order[0] != number:
            random = np.random.default_rng([*self.seed, number])
            self._order = (
                number,
                random.permutation(self.count) if self.shuffle else np.arange(self.count),
            )
        return self._order[1]


class EpochSampler:
    """Take the k-th block of global_batch_size sequences at step k of an epoch; drop an epoch's
    remainder."""

    def __init__(self, count: int, batch: int, seed: int, *, shuffle: bool) -> None:
        self._shuffle, self.batch = EpochShuffle(count, [seed], shuffle=shuffle), batch
        self.steps_per_epoch = count // batch

    def indices(self, step: int) -> Indices:
        """Return the sequences of the global batch of `step` (from 1)."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        return self._shuffle.epoch(epoch)[position * self.batch : (position + 1) * self.batch]


class MixtureSampler:
    """Take sequence by sequence from the part that lags most behind its weight, so that any range
    has the weights' shares.

    Each part runs through its own epochs. An epoch of the mixture has as many sequences as all
    parts together: parts above their share repeat, others are seen in part.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        batch: int,
        seed: int,
        *,
        shuffle: bool,
    ) -> None:
        self.counts, self.batch = list(counts), batch
        self.firsts = np.cumsum([0, *counts])
        # Each part is drawn against the remaining weight of the parts after it.
        rests = np.cumsum(np.asarray(weights, dtype=np.float64)[::-1])[::-1]
        self.shares = [w / rest for w, rest in zip(weights, rests, strict=True)]
        self._parts = [
            EpochShuffle(n, [seed, part], shuffle=shuffle) for part, n in enumerate(counts)
        ]
        self.steps_per_epoch = sum(counts) // batch

    def indices(self, step: int) -> Indices:
        """Return the sequences of the global batch of `step` (from 1)."""
        rest = np.arange((step - 1) * self.batch, step * self.batch, dtype=np.int64)
        out, places = np.empty(self.batch, dtype=np.int64), np.arange(self.batch)
        for part, share in enumerate(self.shares):
            before, after = (
                np.floor((rest + more) * share + 0.5).astype(np.int64) for more in (0, 1)
            )
            mine = (
                after > before
                if part < len(self.shares) - 1
                else np.ones(len(rest), dtype=np.bool_)
            )
            taken = before[mine] if part < len(self.shares) - 1 else rest[mine]
            epochs, positions = np.divmod(taken, self.counts[part])
            rows = np.empty(len(taken), dtype=np.int64)
            for epoch in np.unique(epochs):
                rows[epochs == epoch] = self._parts[part].epoch(int(epoch))[
                    positions[epochs == epoch]
                ]
            out[places[mine]] = rows + self.firsts[part]
            rest, places = (rest - before)[~mine], places[~mine]
        return out


Sampler = EpochSampler | MixtureSampler
