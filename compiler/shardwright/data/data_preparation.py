"""Tokenize a plan's data once into run/data of the compiled folder, without a GPU or process group.

run/data/KEY/ holds one source (indexed_dataset.py). KEY depends on its files and on how they are
read, so another corpus or tokenizer gets another folder. run/data/current.json maps each source's
settings to its KEY; the ranks read that, not the corpus.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardwright.data.conversations import ConversationReader
from shardwright.data.data_sources import (
    MADE_DATASETS,
    DataSource,
    find_source,
    made_folder,
    stdlib_sources,
    tokenized_sections,
)
from shardwright.data.docstring_pairs import write_docstring_pairs
from shardwright.data.image_captions import (
    ContrastiveProcessor,
    ImageCaptionReader,
    has_image_captions,
)
from shardwright.data.image_files import ImageCounts, ImageWriter
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.indexed_dataset import (
    DocumentWriter,
    open_documents,
    read_manifest,
)
from shardwright.data.preferences import PreferenceReader
from shardwright.data.sequences import open_document_sequences
from shardwright.data.shapes_dataset import draw_shapes
from shardwright.data.source_files import ReadingProgress, RecordCounts, text_chunks, texts
from shardwright.data.tokenizers import Tokenizer, document_prefix, load_tokenizer
from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.objectives import PREFERENCE_KIND
from shardwright.recipe.recipe_types import (
    DOCSTRING_PAIRS_DATASET,
    DRAWN_SHAPES_DATASET,
    MASKED_KINDS,
    DataSection,
)
from shardwright.utils.file_io import write_atomically

MAX_UNPREPARED_BYTES = 64 * 2**20
"""Bytes that `run` tokenizes by itself: about a minute for a slow tokenizer, while the GPUs
wait."""

BATCH_BYTES = 2**20
"""Bytes of text that go to the tokenizer at once; it uses all cores."""

CURRENT = "current.json"


def data_folder(folder: Path) -> Path:
    return folder / "run" / "data"


def prepare(
    plan: Plan, folder: Path, *, limit_bytes: int | None, max_records: int | None = None
) -> None:
    """Tokenize the sources that are not tokenized yet.

    limit_bytes: SW6106 where more must be read; None is no limit.
    max_records: records of each source; None is all. Several processes and hosts may call it at
        once: one works, the others wait.
    """
    at = data_folder(folder)
    made = {str(part.path) for part in tokenized_sections(plan)}.intersection(MADE_DATASETS)
    with explain_disk_errors(at):
        if DRAWN_SHAPES_DATASET in made:
            draw_shapes(made_folder(DRAWN_SHAPES_DATASET, folder))
        if DOCSTRING_PAIRS_DATASET in made:
            write_docstring_pairs(made_folder(DOCSTRING_PAIRS_DATASET, folder), stdlib_sources())
    sources = [find_source(part, folder) for part in tokenized_sections(plan)]
    missing = [s for s in sources if s.files and read_manifest(at / s.key) is None]
    gone = [s for s in sources if not s.files and _current_key(at, s.settings) is None]
    if gone:
        raise refusal(
            "SW6101",
            f"no file matches {gone[0].part.path!r} on this host",
            "Make the corpus visible at the same path on every host, or correct data.path and "
            "compile again. Data prepared by `shardwright prepare` is enough, too.",
        )
    size = sum(s.size_bytes for s in missing)
    if limit_bytes is not None and size > limit_bytes:
        raise refusal(
            "SW6106",
            f"{size / 2**20:,.0f} MiB of data are not tokenized yet, and the GPUs would wait "
            f"(run tokenizes up to {limit_bytes // 2**20} MiB by itself)",
            f"Run shardwright prepare {shlex.quote(str(folder))}",
        )
    if not sources:
        return
    with explain_disk_errors(at):
        at.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(at):
            for source in sources:
                if source.files and read_manifest(at / source.key) is None:
                    _tokenize_source(plan, folder, at, source, max_records)
            try:
                known = json.loads((at / CURRENT).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                known = {}
            current = {**known, **{s.settings: s.key for s in sources if s.files}}
            if current != known:
                write_atomically(at / CURRENT, json.dumps(current, indent=1))
            for source in sources:
                if source.part.kind in MASKED_KINDS:
                    here = at / str(_current_key(at, source.settings))
                    length = plan.training.sequence_length
                    open_document_sequences(here, open_documents(here), length, source.part)


@contextlib.contextmanager
def prepared_sample(plan: Plan, folder: Path, max_records: int) -> Iterator[tuple[Plan, Path]]:
    """Prepare the first records of each source in a temporary copy of the compiled folder.

    Yields the plan and the copy, which is deleted with the context. Every unusable record is left
    out and counted (skip_damaged 1.0).
    """

    def tolerant(data: DataSection) -> DataSection:
        return replace(data, skip_damaged=1.0, mixture=tuple(map(tolerant, data.mixture)))

    held_out = plan.validation
    if held_out is not None and held_out.data is not None:
        held_out = replace(held_out, data=tolerant(held_out.data))
    plan = replace(plan, data=tolerant(plan.data), validation=held_out)
    with tempfile.TemporaryDirectory(prefix="shardwright-check-") as temporary:
        copy = Path(temporary)
        for path in folder.iterdir():
            if path.name != "run":
                (copy / path.name).symlink_to(path.absolute())
        prepare(plan, copy, limit_bytes=None, max_records=max_records)
        yield plan, copy


def prepared_folder(part: DataSection, folder: Path) -> Path:
    """Return the folder with the tokens of `part`. Raises SW6120 where they were not made on this
    host."""
    at = data_folder(folder)
    name = _current_key(at, find_source(part, folder, look=False).settings)
    if name is None:
        raise refusal(
            "SW6120",
            f"the data of {part.path!r} is not tokenized on this host",
            f"Run shardwright prepare {shlex.quote(str(folder))}",
        )
    return at / name


def _current_key(at: Path, settings: str) -> str | None:
    """Return the current KEY of these settings, None where its folder is incomplete."""
    try:
        name = str(json.loads((at / CURRENT).read_text(encoding="utf-8"))[settings])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if read_manifest(at / name) is not None else None


@contextlib.contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn disk errors into SW6114 (disk full) and SW6115 (not writable)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise refusal(
                "SW6114",
                f"the disk of {str(folder)!r} is full; partial files were deleted",
                "Free space, or make run/data in the compiled folder a link to a larger disk, "
                "and prepare again.",
            ) from None
        raise refusal(
            "SW6115",
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror or error}",
            ("Make the compiled folder writable (its run/data holds the tokens), or move it."),
        ) from None


@contextlib.contextmanager
def _exclusive_lock(at: Path) -> Iterator[None]:
    """Let one writer work at a time, and delete what a killed one left."""
    with (at / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(
                "waiting for another process that prepares this data",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in at.glob(f".partial-*-{socket.gethostname()}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _tokenize_source(
    plan: Plan, folder: Path, at: Path, source: DataSource, max_records: int | None
) -> None:
    """Write a source under a temporary name, and publish it by renaming.

    Locks do not hold across hosts on every file system: a second writer finds the folder present,
        with the same content.
    """
    tokenizer = load_tokenizer(str(source.part.tokenizer), folder)
    partial = at / f".partial-{source.key}-{socket.gethostname()}-{os.getpid()}"
    writer, image_writer = None, None
    try:
        writer = DocumentWriter(partial, tokenizer.dtype, masked=source.part.kind in MASKED_KINDS)
        image_writer = None if source.part.images is None else ImageWriter(partial)
        progress = ReadingProgress(
            f"tokenizing {source.part.path}", source.size_bytes, shown=max_records is None
        )
        with contextlib.closing(progress) as shown:
            report = RecordCounts(share=source.part.skip_damaged, most=max_records)
            for _ in _read_source(source, folder, tokenizer, writer, image_writer, shown, report):
                if writer.largest_id < plan.model.vocabulary_size:
                    continue
                raise refusal(  # at once, not after hours
                    "SW6105",
                    f"the tokenizer ({tokenizer.size} ids) gives the id {writer.largest_id}, but "
                    f"the model's vocabulary has ids 0 to {plan.model.vocabulary_size - 1}",
                    "Use the tokenizer that belongs to this model, or a model with a larger "
                    "vocab_size.",
                )
            counts = ImageCounts(told=[]) if image_writer is None else image_writer.counts
            report.check(report.share, counts.damaged, counts.told)
            report.write(partial)
        if not writer.documents and (report.left_out or counts.damaged):
            raise refusal(
                "SW6116",
                f"{source.part.path!r} has no usable record among {report.records:,}: "
                f"{report.examples(counts.told)}",
                "Correct the records, or data.path.",
            )
        if not writer.documents:
            raise refusal(
                "SW6116",
                f"{source.part.path!r} holds no text: {len(source.files)} files, all empty",
                "Correct data.path, or fill the files.",
            )
        if image_writer is not None:
            image_writer.finish()
        writer.finish(
            settings=source.settings, kind=source.part.kind, source_bytes=source.size_bytes
        )
        try:
            os.rename(partial, at / source.key)
        except OSError:
            if read_manifest(at / source.key) is None:
                # An unfinished folder of a dead process.
                shutil.rmtree(at / source.key, ignore_errors=True)
                os.rename(partial, at / source.key)
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):  # a full disk refuses buffered data, too
                writer.close()
                if image_writer is not None:
                    image_writer.close()
        shutil.rmtree(partial, ignore_errors=True)


def _read_source(
    source: DataSource,
    folder: Path,
    tokenizer: Tokenizer,
    writer: DocumentWriter,
    image_writer: ImageWriter | None,
    shown: ReadingProgress,
    report: RecordCounts,
) -> Iterator[None]:
    """Yield after each batch that is written."""
    part, images = source.part, source.part.images
    if images is None or image_writer is None:
        if part.kind == PREFERENCE_KIND:
            return PreferenceReader(part, tokenizer, writer, report).read(source.files, shown)
        if part.kind != "chat":
            return _read_texts(part, source.files, tokenizer, writer, shown, report)
        return ConversationReader(part, tokenizer, writer, report).read(source.files, shown)
    if has_image_captions(part):
        pairs = ContrastiveProcessor(folder / str(part.tokenizer), images)
        return ImageCaptionReader(part, pairs, writer, image_writer, report).read(
            source.files, shown
        )
    with_images = ImageProcessor(folder / str(part.tokenizer), images), image_writer
    reader = ConversationReader(part, tokenizer, writer, report, with_images)
    return reader.read(source.files, shown)


def _read_texts(
    part: DataSection,
    files: tuple[str, ...],
    tokenizer: Tokenizer,
    writer: DocumentWriter,
    shown: ReadingProgress,
    report: RecordCounts,
) -> Iterator[None]:
    """Yield after each batch that is written.

    A text file is one document. With a limit on records, it ends after its first piece.
    """
    begin = document_prefix(tokenizer, part.add_bos_token)
    batch: list[Piece] = []
    size = 0
    for name in files:
        pieces: Iterator[Piece]
        if part.kind != "text":
            pieces = ((*text, True) for text in texts(name, part.kind, part.field, report))
        elif report.is_full:
            break
        else:
            report.records += 1
            first = 1 if report.most is not None else None
            chunks = ((*chunk, False) for chunk in itertools.islice(text_chunks(name), first))
            pieces = itertools.chain(chunks, [("", 0, True)])
        for piece in pieces:
            batch.append(piece)
            size += len(piece[0])
            if size >= BATCH_BYTES:
                _flush(batch, tokenizer, begin, writer, shown)
                batch, size = [], 0
                yield
    _flush(batch, tokenizer, begin, writer, shown)
    yield


Piece = tuple[str, int, bool]
"""(text, bytes of the source, whether its document ends with it)"""


def _flush(
    batch: list[Piece],
    tokenizer: Tokenizer,
    begin: list[int],
    writer: DocumentWriter,
    shown: ReadingProgress,
) -> None:
    encoded = tokenizer.encode([text for text, _, _ in batch])
    for ids, (_, _, ends) in zip(encoded, batch, strict=True):
        if len(ids):
            # A text may already start with these ids.
            if begin and writer.at_begin and ids[: len(begin)].tolist() != begin:
                writer.extend(np.asarray(begin, dtype=np.int32))
            writer.extend(ids)
        if ends:
            writer.end_document(tokenizer.end)
    shown.add(sum(size for _, size, _ in batch))
