"""Summarize prepared data: counts of each source, and samples with their labels marked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.data_preparation import prepared_folder
from shardwright.data.data_sources import data_sections
from shardwright.data.dataset import Dataset, open_sequences
from shardwright.data.image_captions import ContrastiveProcessor, has_image_captions
from shardwright.data.image_files import (
    ImageCounts,
    open_images,
    read_image_counts,
)
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.indexed_dataset import open_documents, open_megatron, read_manifest
from shardwright.data.sequences import PADDING_ID, SequenceBatch, open_document_sequences
from shardwright.data.source_files import RecordCounts, read_record_counts
from shardwright.data.tokenizers import Ids, document_prefix, load_tokenizer
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import (
    DOCUMENT_KINDS,
    MASKED_KINDS,
    TOKENIZED_KINDS,
    DataSection,
)

SAMPLES = 3
EDGE_TOKENS = 60
"""Tokens shown at either end of a span of a sample."""
MAX_SPANS = 7
"""Spans shown of a sample: three answers and what surrounds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """Count what one source gives. A source without documents (tokens, synthetic) has sequences and
    tokens only.

    sequences: of the complete source, held-out ones included.
    tokens: used tokens in documents.
    trained_tokens: labels among them.
    left_out: conversations without a label in their first S tokens.
    cut: conversations longer than S.
    empty: files and records without text.
    unpacked_padding: share of padding without packing.
    padding: share of padding as the sequences are.
    pictures: images in all conversations.
    too_long: conversations with images left out because they are longer than S.
    too_many_images: conversations left out because of more than images.per_row.
    damaged: conversations left out because of a damaged image.
    records: records read.
    unusable: diagnostic code -> records left out.
    examples: diagnostic code -> first messages, damaged images included (SW6134).
    replaced: records in which an unpaired surrogate became U+FFFD.
    reasoning_not_rendered: conversations whose reasoning the template does not write.
    unclosed_conversations: conversations whose last answer the template does not close.
    begin: text that each document starts with; None for conversations and captions.
    """

    kind: str
    path: str | None
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    left_out: int = 0
    cut: int = 0
    empty: int = 0
    unpacked_padding: float = 0.0
    padding: float = 0.0
    pictures: int = 0
    too_long: int = 0
    too_many_images: int = 0
    damaged: int = 0
    records: int = 0
    unusable: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    replaced: int = 0
    reasoning_not_rendered: int = 0
    unclosed_conversations: int = 0
    begin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpan:
    """Hold a span of a sample: its text, and whether its tokens are labels."""

    text: str
    trained: bool


def summarize(plan: Plan, folder: Path) -> tuple[SourceSummary, ...]:
    """Count the sources of the training data.

    folder: compiled and prepared.
    """
    return tuple(_part(plan, part, folder) for part in data_sections(plan.data))


def summarize_validation(plan: Plan, folder: Path) -> tuple[SourceSummary, ...]:
    """Count the sources of separate validation data; () where there are none."""
    held_out = None if plan.validation is None else plan.validation.data
    return (
        ()
        if held_out is None
        else tuple(_part(plan, part, folder) for part in data_sections(held_out))
    )


def _part(plan: Plan, part: DataSection, folder: Path) -> SourceSummary:
    length = plan.training.sequence_length
    sequences = len(open_sequences(plan, part, folder, 1))
    if part.kind not in (*DOCUMENT_KINDS, *MASKED_KINDS):
        tokens = sequences * length
        return SourceSummary(
            kind=part.kind,
            path=part.path,
            sequences=sequences,
            tokens=tokens,
            trained_tokens=tokens - sequences,
        )
    here = None if part.kind == "megatron" else prepared_folder(part, folder)
    documents = open_megatron(str(part.path)) if here is None else open_documents(here)
    manifest = None if here is None else read_manifest(here)
    left_out, cut, padding, too_long = 0, 0, 0.0, 0
    pictures = None if here is None else open_images(here)
    counts = ImageCounts(told=[]) if here is None or pictures is None else read_image_counts(here)
    lengths = documents.lengths
    # A document's first token is no label, and neither are a caption's tokens.
    trained = len(documents.tokens) - (len(documents.ends) if part.packing else 1)
    if has_image_captions(part):
        trained = 0
    if part.kind in MASKED_KINDS and here is not None:
        rows = open_document_sequences(here, documents, length, part)
        too_long = 0 if pictures is None else int((lengths > length).sum())
        left_out = len(lengths) - len(rows.members) - too_long
        shown = rows.shown_lengths(rows.members)
        cut, lengths = int((lengths[rows.members] > shown).sum()), shown
        assert documents.trained is not None, "a conversation's tokens are marked"
        first = documents.ends[rows.members] - documents.lengths[rows.members]
        spans = zip((first + 1).tolist(), (first + lengths).tolist(), strict=True)
        trained = sum(int(np.count_nonzero(documents.trained[a:b])) for a, b in spans)
        padding = 1 - int(lengths.sum()) / max(1, len(rows) * length)
    if has_image_captions(part):
        cut, lengths = int((lengths > length).sum()), np.minimum(lengths, length)
        padding = 1 - int(lengths.sum()) / max(1, len(lengths) * length)
    begin = None
    if part.kind in ("text", "jsonl", "parquet") and not has_image_captions(part):
        tokenizer = load_tokenizer(str(part.tokenizer), folder)
        ids = document_prefix(tokenizer, part.add_bos_token)
        begin = tokenizer.decode(np.asarray(ids, dtype=np.int32)) if ids else ""
    report = RecordCounts() if here is None else read_record_counts(here)
    tokens = int(lengths.sum())
    alone = int((-(-lengths // length)).sum()) * length
    return SourceSummary(
        kind=part.kind,
        path=part.path,
        sequences=sequences,
        documents=len(documents.ends),
        tokens=tokens,
        trained_tokens=trained,
        left_out=left_out,
        cut=cut,
        empty=0 if manifest is None else manifest.empty,
        unpacked_padding=1 - tokens / max(1, alone),
        padding=padding,
        pictures=0 if pictures is None else len(pictures.index),
        too_long=too_long,
        too_many_images=counts.too_many_images,
        damaged=counts.damaged,
        records=report.records,
        unusable=report.left_out,
        examples=report.first | ({"SW6134": counts.told} if counts.damaged else {}),
        replaced=report.replaced,
        reasoning_not_rendered=report.reasoning_not_rendered,
        unclosed_conversations=report.unclosed_conversations,
        begin=begin,
    )


def samples(plan: Plan, folder: Path, data: Dataset) -> list[list[SampleSpan]]:
    """Return the first training sequences around their labels; of a packed one, its first
    document."""
    text = _decoder(plan, folder)
    rows = np.concatenate([data.order.indices(step) for step in range(1, SAMPLES + 1)])[:SAMPLES]
    return [_row_spans(data.train.read(rows[n : n + 1]), text) for n in range(len(rows))]


def record_samples(plan: Plan, folder: Path) -> list[list[SampleSpan]]:
    """Reads the first documents of the training's sources in turn, around their labels, whether a
    sequence is full or not; of a source without documents its first sequences."""
    text, length = _decoder(plan, folder), plan.training.sequence_length

    def of_part(part: DataSection) -> Iterator[list[SampleSpan]]:
        if part.kind not in TOKENIZED_KINDS:
            rows = open_sequences(plan, part, folder, 1)
            yield from (
                _row_spans(rows.read(np.asarray([n])), text) for n in range(min(SAMPLES, len(rows)))
            )
            return
        documents = open_documents(prepared_folder(part, folder))
        for first, last in itertools.pairwise([0, *documents.ends[:SAMPLES].tolist()]):
            last = min(last, first + length)
            trained = np.ones(last - first, dtype=np.bool_)
            trained[:] = (
                not has_image_captions(part)
                if documents.trained is None
                else documents.trained[first:last]
            )
            yield _spans(documents.tokens[first:last], trained, text)

    turns = itertools.zip_longest(*(of_part(part) for part in data_sections(plan.data)))
    return [found for turn in turns for found in turn if found is not None][:SAMPLES]


def _decoder(plan: Plan, folder: Path) -> Callable[[Ids], str]:
    """Return a function from ids to text; without a tokenizer it prints the ids."""
    names = [part.tokenizer for part in data_sections(plan.data) if part.tokenizer]
    if names:
        return load_tokenizer(names[0], folder).decode
    return lambda ids: " ".join(map(str, ids.tolist())) + " "


def _row_spans(block: SequenceBatch, text: Callable[[Ids], str]) -> list[SampleSpan]:
    """Return the spans of a sequence's first document, without padding."""
    ids = block.tokens[0]
    # Captions are not labels: pairs have images and no label mask.
    trained = (
        np.full(len(ids), not block.pictures)
        if block.loss_mask is None
        else block.loss_mask[0].copy()
    )
    stop = len(ids)
    if block.starts is not None:
        begins = np.flatnonzero(block.starts[0])
        begins = begins[begins > 0]
        stop = int(begins[0]) if len(begins) else stop
    if block.loss_mask is not None:
        stop = int(np.flatnonzero(trained[:stop] | (ids[:stop] != PADDING_ID))[-1]) + 1
    return _spans(ids[:stop], trained[:stop], text)


def _spans(
    ids: Ids, trained: npt.NDArray[np.bool_], text: Callable[[Ids], str]
) -> list[SampleSpan]:
    """Split a document at its labels and shorten each span to its start and end.

    Before the first answer only the end is shown, after the last only the start.
    """
    trained[0] = False
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    stretches = list(itertools.pairwise(borders))
    spans: list[SampleSpan] = []
    for number, (first, last) in enumerate(stretches[:MAX_SPANS]):
        is_label, is_last = bool(trained[first]), number == len(stretches) - 1
        if last - first <= 2 * EDGE_TOKENS:
            shown = text(ids[first:last])
        elif not is_label and not number:
            shown = f"... {text(ids[last - 2 * EDGE_TOKENS : last])}"
        elif not is_label and is_last:
            shown = f"{text(ids[first : first + 2 * EDGE_TOKENS])} ..."
        else:
            shown = (
                f"{text(ids[first : first + EDGE_TOKENS])} ... "
                f"{text(ids[last - EDGE_TOKENS : last])}"
            )
        spans.append(SampleSpan(text=shown, trained=is_label))
    return [*spans, SampleSpan(text=" ...", trained=False)] if len(stretches) > MAX_SPANS else spans


def marked(pieces: Sequence[SampleSpan], begin: str, end: str) -> str:
    """Join a sample to one text, with `begin` and `end` around labels."""
    return "".join(f"{begin}{p.text}{end}" if p.trained else p.text for p in pieces)


# Throughput of decoding images on this machine, and the cores that the plan's steps need.


TIMED_IMAGES = 32
"""Images that are timed, from all over the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageThroughput:
    """Hold image rates.

    images_per_core_second: images that a core decodes and prepares in a second.
    wanted: images that the planned steps consume in a second.
    cores: cores of all hosts together.
    ranks: ranks of the first pipeline stage, which share the images.
    """

    images_per_core_second: float
    wanted: float
    cores: int
    ranks: int


def image_throughput(plan: Plan, folder: Path) -> ImageThroughput | None:
    """Time some images; None where no sequence has one. Raises SW6132 and SW6133.

    folder: compiled and prepared.
    """
    seconds, pictures = 0.0, 0.0  # per sequence, over the parts of the data
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
                here, documents, plan.training.sequence_length, part
            ).members
        held = table.index[np.isin(table.index[:, 0], rows)]
        if not len(held):
            continue
        each = part.weight / whole * len(held) / len(rows)
        pictures += each
        make = ContrastiveProcessor if has_image_captions(part) else ImageProcessor
        processor = make(folder / str(part.tokenizer), part.images)
        sample = held[np.unique(np.linspace(0, len(held) - 1, TIMED_IMAGES).astype(np.int64))]
        images = [
            picture
            for row in sample
            for picture in dataclasses.replace(table, index=row[None]).of(int(row[0]))
        ]
        no_tokens = np.zeros((1, 0), dtype=np.int64)
        processor.inputs(no_tokens, None, [[images[0]]])  # imports
        started = time.process_time()  # CPU time, whatever else runs on this machine
        for image in images:
            processor.inputs(no_tokens, None, [[image]])
        seconds += each * ((time.process_time() - started) / len(images))
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
