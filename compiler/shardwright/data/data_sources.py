"""Find the files of one part of the data, and the key of its prepared tokens."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.data.indexed_dataset import PREPARED_FORMAT
from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import (
    DOCSTRING_PAIRS_DATASET,
    DRAWN_SHAPES_DATASET,
    PYTHON_STDLIB_DATASET,
    TOKENIZED_KINDS,
    DataSection,
)

_SKIPPED_STDLIB = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Describe one source.

    files: in a fixed order, () where this host has none.
    size_bytes: size of all files.
    settings: hash of everything that decides how they are read.
    key: hash of settings and the files' names, sizes and times.
    """

    part: DataSection
    files: tuple[str, ...]
    size_bytes: int
    settings: str
    key: str


def data_sections(data: DataSection) -> tuple[DataSection, ...]:
    return data.mixture or (data,)


def all_data_sections(plan: Plan) -> Iterator[DataSection]:
    """Yield the parts of the training and validation data."""
    held_out = None if plan.validation is None else plan.validation.data
    for data in (plan.data, held_out):
        yield from () if data is None else data_sections(data)


def tokenized_sections(plan: Plan) -> Iterator[DataSection]:
    """Yield the parts that are tokenized; others are memory-mapped as they are."""
    return (part for part in all_data_sections(plan) if part.kind in TOKENIZED_KINDS)


def uses_packing(plan: Plan) -> bool:
    """Return whether any part packs documents into sequences."""
    return any(part.joins_documents for part in all_data_sections(plan))


def find_source(part: DataSection, folder: Path, *, look: bool = True) -> DataSource:
    """Find a source.

    folder: the compiled one, which holds the tokenizer.
    look: whether to find the files too.
    """
    files = tuple(matching_files(str(part.path), folder)) if look else ()
    tokenizer = part.tokenizer
    if tokenizer not in (None, "byte"):
        paths = sorted((folder / str(tokenizer)).iterdir())
        tokenizer = _digest([[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in paths])
    read_by: list[object] = [PREPARED_FORMAT, part.kind, part.path, tokenizer]
    read_by += [part.field, part.messages, part.template, part.train_on, part.skip_damaged]
    read_by += [part.labelled, part.scored, part.add_bos_token]
    read_by.append(None if part.images is None else asdict(part.images))
    settings = _digest(read_by)
    try:
        stats = [os.stat(name) for name in files]
    except OSError as error:
        raise refusal(
            "SW6101",
            f"{error.filename!r} cannot be read: {error.strerror}",
            "Keep other programs from changing the data while it is read, and start again.",
        ) from None
    listed = [[name, s.st_size, s.st_mtime_ns] for name, s in zip(files, stats, strict=True)]
    return DataSource(
        part=part,
        files=files,
        size_bytes=sum(s.st_size for s in stats),
        settings=settings,
        key=_digest([settings, listed]),
    )


MADE_DATASETS = (DRAWN_SHAPES_DATASET, DOCSTRING_PAIRS_DATASET)
"""Built-in data sets that `prepare` writes."""


def made_folder(name: str, folder: Path) -> Path:
    """Return the folder of one of MADE_DATASETS in the compiled folder."""
    own = {DRAWN_SHAPES_DATASET: "shapes", DOCSTRING_PAIRS_DATASET: "docstrings"}
    return folder / "run" / "data" / own[name]


def stdlib_sources() -> list[str]:
    """Return the source files of this Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        f for f in root.rglob("*.py") if not set(f.relative_to(root).parts) & set(_SKIPPED_STDLIB)
    ]
    return sorted(str(f) for f in files)


def matching_files(path: str, folder: Path) -> list[str]:
    """Return the files that data.path names, in a fixed order.

    folder: the compiled one.
    """
    if path in MADE_DATASETS:
        path = str(made_folder(path, folder).absolute() / "data.jsonl")
        return [path] if os.path.isfile(path) else []
    if path == PYTHON_STDLIB_DATASET:
        return stdlib_sources()
    if os.path.isfile(path):
        return [path]
    return sorted(f for f in glob.glob(path, recursive=True) if os.path.isfile(f))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8")).hexdigest()[:32]
