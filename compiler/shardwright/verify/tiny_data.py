"""What the tiny copy trains on and is evaluated with: random tokens, in documents where the recipe
packs its own, and random conversations, with the padding that they leave, where it has
conversations."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwright.recipe.recipe_types import DOCUMENT_KINDS, Recipe
from shardwright.utils.json_types import JsonObject

if TYPE_CHECKING:
    from shardwright.data.sequences import SequenceBatch
    from shardwright.verify.reference_run import Rows

LONGEST = 40
"""Tokens of a document: some end within a row, some go on in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """ids: (rows, sequence length). ends: of the documents, in the stream that the rows are cut
    from; None: no documents."""

    ids: npt.NDArray[np.int32]
    ends: tuple[int, ...] | None

    def write(self, path: Path) -> JsonObject:
        """The keys of a recipe that name the files. path: without an ending."""
        if self.ends is None:
            np.save(path.with_suffix(".npy"), self.ids)
            return {"kind": "tokens", "path": f"{path.name}.npy", "packing": False}
        self.ids.tofile(path.with_suffix(".bin"))
        ends = np.asarray(self.ends, dtype=np.int64)
        lengths = np.diff(ends, prepend=0).astype(np.int32)
        # Megatron's index (data/megatron_indexed_dataset.py reads it): a sequence is a document.
        counts = len(ends).to_bytes(8, "little") + (len(ends) + 1).to_bytes(8, "little")
        arrays = (lengths, (ends - lengths) * 4, np.arange(len(ends) + 1, dtype=np.int64))
        head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([4]) + counts
        path.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
        return {"kind": "megatron", "path": path.name, "packing": True}

    def rows(self, first: int, stop: int) -> Rows:
        """As a plain model takes them: a block of rows, or each document's piece of a row alone."""
        import torch

        ids = torch.from_numpy(self.ids[first:stop].astype(np.int64))
        if self.ends is None:
            return [{"input_ids": ids, "labels": ids}]
        pieces, length = [], ids.shape[1]
        for row, tokens in enumerate(ids, first):
            cuts = [end - row * length for end in self.ends if 0 < end - row * length < length]
            pieces += [
                (row, tokens[a:b][None]) for a, b in zip([0, *cuts], [*cuts, length], strict=True)
            ]
        return [{"input_ids": piece, "labels": piece, "row": row} for row, piece in pieces]


TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] + '\n' }}{% endfor %}"
"""Every token of such a conversation is a label, so that its labels follow from its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations of one message each, as bytes."""

    texts: tuple[str, ...]
    packed: bool

    def write(self, path: Path) -> JsonObject:
        """As Tokens.write."""
        lines = [
            json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n"
            for text in self.texts
        ]
        path.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        return {
            "kind": "chat",
            "path": f"{path.name}.jsonl",
            "tokenizer": "byte",
            "template": TEMPLATE,
            "train_on": "all",
            "packing": self.packed,
        }


def separate_sequences(block: SequenceBatch, *, padded: bool) -> Rows:
    """Each row, or each document of a packed row, alone. padded: rows keep their padding, whose
    length some rotary embeddings follow; else it is cut off."""
    import torch

    from shardwright.models.tasks.causal_lm import IGNORE_INDEX

    lengths = (
        np.full(len(block.tokens), block.tokens.shape[1])
        if block.lengths is None
        else block.lengths
    )
    rows: Rows = []
    for row, (tokens, real) in enumerate(zip(block.tokens, lengths.tolist(), strict=True)):
        ids = torch.from_numpy(tokens.astype(np.int64))
        if block.starts is None:
            kept = ids if padded else ids[:real]
            labels = torch.where(torch.arange(len(kept)) < real, kept, torch.tensor(IGNORE_INDEX))
            rows.append({"input_ids": kept[None], "labels": labels[None], "real": real})
            continue
        cuts = [cut for cut in np.flatnonzero(block.starts[row]).tolist() if 0 < cut < real]
        pieces = [ids[a:b][None] for a, b in itertools.pairwise([0, *cuts, real])]
        rows += [{"input_ids": piece, "labels": piece, "row": row} for piece in pieces]
    return rows


def packs_documents(recipe: Recipe) -> bool:
    return any(
        part.packing and part.kind in DOCUMENT_KINDS for _, part in recipe.dataset_sections()
    )


def has_conversations(recipe: Recipe) -> bool:
    """Whether rows may end in padding: conversations stay whole."""
    return any(part.kind == "chat" for _, part in recipe.dataset_sections())


def random_conversations(seed: int, rows: int, length: int, *, packed: bool) -> Conversations:
    """Conversations for so many rows of `length` tokens: of a token more than the template's two up
    to a whole row."""
    random = np.random.default_rng(seed)
    shortest = length // 3 if packed else 1  # several fill a row, hardly ever to its end
    sizes = random.integers(shortest, length - 1, 4 * rows if packed else rows)
    return Conversations(
        texts=tuple("".join(map(chr, random.integers(32, 127, size))) for size in sizes),
        packed=packed,
    )


def random_tokens(
    seed: int,
    rows: int,
    length: int,
    vocabulary: int,
    *,
    packed: bool,
    special: tuple[int, ...] = (),
) -> Tokens:
    """Draw ids of the vocabulary, one in eight of them a special one."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, vocabulary, (rows, length), dtype=np.int32)
    if special:
        ids = np.where(
            random.random(ids.shape) < 1 / 8,
            random.choice(np.array(special, dtype=np.int32), ids.shape),
            ids,
        )
    if not packed:
        return Tokens(ids=ids, ends=None)
    ends = np.cumsum(random.integers(1, LONGEST, ids.size))
    return Tokens(ids=ids, ends=(*(int(end) for end in ends if end < ids.size), ids.size))
