"""What `prepare` tells of the data: counts, the padding that packing saves, and sequences as the model sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwright.data.dataset import Dataset
from shardwright.data.megatron import open_megatron
from shardwright.data.pairs import is_of_pairs
from shardwright.data.pictures import Counts, open_pictures, read_counts
from shardwright.data.prepare import prepared_folder
from shardwright.data.read_report import ReadReport, read_report
from shardwright.data.rows import PADDING_ID, TokenBlock
from shardwright.data.sources import parts_of
from shardwright.data.store import Documents, open_documents, read_manifest
from shardwright.data.tokenizers import Ids, begin_of_document, load_tokenizer
from shardwright.data.whole import whole_rows
from shardwright.ir.recipe import DOCUMENT_KINDS, DataSection
from shardwright.plan.plan import Plan

SAMPLES = 3
SAMPLE_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """documents, tokens: 0 where the kind knows none. trained_tokens: labels among them. left_out: conversations
    without a label in their first S tokens; cut: those longer than S. empty: files and records without text.

    Of conversations with pictures: pictures: those of all; too_long: left out because they are longer than S; crowded:
    because they hold more than images.per_row; damaged: because a picture of theirs cannot be used.

    records: read; unusable: code of a diagnostic -> records left out for it; examples: messages of the first ones.
    replaced: records in which half of a surrogate pair became U+FFFD. without_reasoning: conversations whose reasoning
    the template does not write; without_end: those whose last answer it does not close.

    begin: what each document of text begins with; None for conversations and captions.

    padding_alone: share of padding with each document in rows of its own; padding: as the rows are.
    """

    kind: str
    path: str | None
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    left_out: int = 0
    cut: int = 0
    empty: int = 0
    padding_alone: float = 0.0
    padding: float = 0.0
    pictures: int = 0
    too_long: int = 0
    crowded: int = 0
    damaged: int = 0
    records: int = 0
    unusable: dict[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    replaced: int = 0
    without_reasoning: int = 0
    without_end: int = 0
    begin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """A stretch of a sample: its text, and whether the model learns to write it."""

    text: str
    trained: bool


def summarize(plan: Plan, folder: Path) -> tuple[PartSummary, ...]:
    return tuple(_part(plan, part, folder) for part in parts_of(plan.data))


def _part(plan: Plan, part: DataSection, folder: Path) -> PartSummary:
    length = plan.training.sequence_length
    if part.kind not in DOCUMENT_KINDS:
        return PartSummary(kind=part.kind, path=part.path)
    here = None if part.kind == "megatron" else prepared_folder(part, folder)
    documents = open_megatron(str(part.path)) if here is None else open_documents(here)
    manifest = None if here is None else read_manifest(here)
    left_out, cut, padding, too_long = 0, 0, 0.0, 0
    pictures = None if here is None else open_pictures(here)
    counts = Counts(told=[]) if here is None or pictures is None else read_counts(here)
    lengths = documents.lengths
    if part.kind == "chat" and here is not None:
        rows = whole_rows(here, documents, length, packed=part.packing)
        too_long = 0 if pictures is None else int((lengths > length).sum())
        left_out, lengths = len(lengths) - len(rows.members) - too_long, lengths[rows.members]
        cut = int((lengths > length).sum())
        lengths = np.minimum(lengths, length)
        padding = 1 - int(lengths.sum()) / max(1, len(rows) * length)
    if is_of_pairs(part):
        cut, lengths = int((lengths > length).sum()), np.minimum(lengths, length)
        padding = 1 - int(lengths.sum()) / max(1, len(lengths) * length)
    report = ReadReport() if here is None else read_report(here)
    begin = begin_text(part, folder)
    tokens = int(lengths.sum())
    alone = int((-(-lengths // length)).sum()) * length
    return PartSummary(
        kind=part.kind,
        path=part.path,
        documents=len(documents.ends),
        tokens=len(documents.tokens),
        trained_tokens=_trained(documents, part),
        left_out=left_out,
        cut=cut,
        empty=0 if manifest is None else manifest.empty,
        padding_alone=1 - tokens / max(1, alone),
        padding=padding,
        pictures=0 if pictures is None else len(pictures.index),
        too_long=too_long,
        crowded=counts.crowded,
        damaged=counts.damaged,
        records=report.records,
        unusable=report.left_out,
        examples=tuple(report.examples),
        replaced=report.replaced,
        without_reasoning=report.without_reasoning,
        without_end=report.without_end,
        begin=begin,
    )


def begin_text(part: DataSection, folder: Path) -> str | None:
    """The text of the ids in front of each document; None where another rule counts."""
    if part.kind not in ("text", "jsonl", "parquet") or is_of_pairs(part):
        return None
    tokenizer = load_tokenizer(str(part.tokenizer), folder)
    begin = begin_of_document(tokenizer, part.add_bos_token)
    return tokenizer.decode(np.asarray(begin, dtype=np.int32)) if begin else ""


def _trained(documents: Documents, part: DataSection) -> int:
    """What nothing stands before cannot be predicted, and of a caption nothing is."""
    if is_of_pairs(part):
        return 0
    firsts = np.concatenate([[0], documents.ends[:-1]])
    if documents.trained is not None:
        return int(documents.trained.sum()) - int(documents.trained[firsts].sum())
    return len(documents.tokens) - (len(firsts) if part.packing else 1)


def samples(plan: Plan, folder: Path, data: Dataset) -> list[list[TextSpan]]:
    """Of the first sequences of the training: the beginning, or what stands around the first label."""
    names = [part.tokenizer for part in parts_of(plan.data) if part.tokenizer]
    tokenizer = load_tokenizer(names[0], folder) if names else None

    def text(ids: Ids) -> str:
        return " ".join(map(str, ids.tolist())) + " " if tokenizer is None else tokenizer.decode(ids)

    rows = np.concatenate([data.order.indices(step) for step in range(1, SAMPLES + 1)])[:SAMPLES]
    return [_pieces(data.train.read(rows[n : n + 1]), text) for n in range(len(rows))]


def _pieces(block: TokenBlock, text: Callable[[Ids], str]) -> list[TextSpan]:
    """Of the first document of a row."""
    ids = block.tokens[0]
    trained = np.ones(len(ids), dtype=np.bool_) if block.trained is None else block.trained[0].copy()
    trained[0] = False
    stop = len(ids)
    if block.starts is not None:
        begins = np.flatnonzero(block.starts[0])
        begins = begins[begins > 0]
        stop = int(begins[0]) if len(begins) else stop
    if block.trained is not None:
        stop = int(np.flatnonzero(trained[:stop] | (ids[:stop] != PADDING_ID))[-1]) + 1
    # To the end of the first answer and beyond, not a page of what stands in front of it.
    labels = np.flatnonzero(trained[:stop])
    start = max(0, int(labels[0]) - SAMPLE_TOKENS // 2) if len(labels) and labels[0] > SAMPLE_TOKENS // 2 else 0
    stop = min(stop, start + SAMPLE_TOKENS)
    borders = [start, *(start + np.flatnonzero(np.diff(trained[start:stop])) + 1).tolist(), stop]
    found = [TextSpan(text=text(ids[a:b]), trained=bool(trained[a])) for a, b in itertools.pairwise(borders) if b > a]
    return [TextSpan(text="... ", trained=False), *found] if start else found


def marked(pieces: Sequence[TextSpan], begin: str, end: str) -> str:
    """One text, with what is trained between the two marks."""
    return "".join(f"{begin}{p.text}{end}" if p.trained else p.text for p in pieces)
