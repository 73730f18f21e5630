"""Store prepared data on disk, one folder a source, memory-mapped by every rank.

tokens.bin: the ids of all documents, concatenated. documents.bin: int64, the end of each document.
trained.bin: one byte a token, 1 for a label; only where some are not labels. manifest.json is
written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shardwright.diagnostics import refusal
from shardwright.utils.json_values import copy_shared_fields

MANIFEST = "manifest.json"
BUFFER_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenManifest:
    """Describe a folder.

    settings: hash of the DataSource's settings.
    dtype: type of tokens.bin.
    trained: number of labels, None where every token is one.
    empty: source files and records without text.
    digest: SHA-256 (hex) of everything written.
    """

    format: int
    settings: str
    kind: str
    dtype: str
    tokens: int
    documents: int
    trained: int | None
    largest_id: int
    source_bytes: int
    empty: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Hold documents.

    tokens: (n,) ids.
    ends: (documents,) int64.
    trained: (n,) bool, None where every token is a label.
    """

    tokens: npt.NDArray[np.integer]
    ends: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)


class DocumentWriter:
    """Append documents to a folder that nobody reads yet."""

    def __init__(self, folder: Path, dtype: str, *, masked: bool) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)
        folder.mkdir(parents=True)
        self._tokens = self._open("tokens.bin")
        self._ends = self._open("documents.bin")
        self._trained = self._open("trained.bin") if masked else None
        self.tokens = self.documents = self.trained = self.empty = 0
        self.largest_id = -1
        self._digest = hashlib.sha256()
        self._first = 0  # first token of the current document

    def _open(self, name: str) -> BinaryIO:
        return (self.folder / name).open("wb", buffering=BUFFER_BYTES)

    def _write(self, file: BinaryIO, data: bytes) -> None:
        self._digest.update(data)
        file.write(data)

    def add(
        self, ids: npt.NDArray[np.integer], trained: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Write a complete document."""
        if len(ids):
            self.extend(ids, trained)
        self.end_document(())

    @property
    def at_begin(self) -> bool:
        """Return whether the next ids are the first of a document."""
        return self.tokens == self._first

    def extend(
        self, ids: npt.NDArray[np.integer], trained: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Write a non-empty piece of a document."""
        self._write(self._tokens, ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max()))
        if self._trained is not None and trained is not None:
            self._write(self._trained, trained.astype(np.uint8).tobytes())
            self.trained += int(trained.sum())

    def end_document(self, closing: Sequence[int]) -> None:
        """End a document, with the ids `closing`; one without ids of its own counts as empty and is
        left out."""
        if self.at_begin:
            self.empty += 1
            return
        if closing:
            self.extend(np.asarray(closing, dtype=np.int32))
        self._first = self.tokens
        self._write(self._ends, np.int64(self.tokens).tobytes())
        self.documents += 1

    def finish(self, *, settings: str, kind: str, source_bytes: int) -> TokenManifest:
        """Write everything to disk, the manifest last."""
        self.close(sync=True)
        manifest = copy_shared_fields(
            TokenManifest,
            self,
            format=PREPARED_FORMAT,
            settings=settings,
            kind=kind,
            dtype=self.dtype.name,
            trained=None if self._trained is None else self.trained,
            source_bytes=source_bytes,
            digest=self._digest.hexdigest(),
        )
        with (self.folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file)
            file.flush()
            os.fsync(file.fileno())
        return manifest

    def close(self, *, sync: bool = False) -> None:
        with contextlib.ExitStack() as stack:  # close each, even if another fails
            for file in (self._tokens, self._ends, self._trained):
                if file is not None and not file.closed:
                    stack.callback(file.close)
                    if sync:
                        file.flush()
                        os.fsync(file.fileno())


def read_manifest(folder: Path) -> TokenManifest | None:
    """Read a folder's manifest, None where it is unfinished or of another format."""
    try:
        manifest = TokenManifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return manifest if manifest.format == PREPARED_FORMAT else None


def open_documents(folder: Path) -> Documents:
    """Map a folder's documents. Raises SW6120 where files are missing or shorter than the manifest
    says."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise damaged_data(folder, "it has no manifest")
    dtype = np.dtype(manifest.dtype)
    arrays: list[npt.NDArray[np.integer]] = []
    for name, kind, count in (
        ("tokens.bin", dtype, manifest.tokens),
        ("documents.bin", np.dtype(np.int64), manifest.documents),
        ("trained.bin", np.dtype(np.uint8), None if manifest.trained is None else manifest.tokens),
    ):
        if count is None:
            continue
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != count * kind.itemsize:
            raise damaged_data(folder, f"{name} has {size} bytes, not {count * kind.itemsize}")
        arrays.append(np.memmap(path, dtype=kind, mode="r", shape=(count,)))
    return Documents(
        tokens=arrays[0],
        ends=arrays[1].view(np.int64),
        trained=arrays[2].view(np.bool_) if len(arrays) == 3 else None,
    )


def damaged_data(folder: Path, why: str) -> Exception:
    """Build SW6120."""
    return refusal(
        "SW6120",
        f"the prepared data in {str(folder)!r} is damaged: {why}",
        "Delete that folder and run `shardwright prepare` again.",
    )


PREPARED_FORMAT = 1
"""Version of the prepared files, part of their key."""

# Megatron's indexed datasets: NAME.bin holds ids, NAME.idx lengths of sequences and documents
# (megatron-core 0.16, core/datasets/indexed_dataset.py, _IndexWriter).


_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8


def open_megatron(path: str) -> Documents:
    """Open the dataset at `path`, without file extension. Raises SW6119."""
    try:
        return _open(path)
    except (OSError, ValueError) as error:
        raise refusal(
            "SW6119",
            f"{path!r} is not an indexed dataset of Megatron: {error}",
            "Set data.path to the path that preprocess_data.py wrote, without .idx and .bin; "
            "both files must exist.",
        ) from None


def _open(path: str) -> Documents:
    index = np.memmap(path + ".idx", dtype=np.uint8, mode="r")
    if len(index) < _HEADER_BYTES or bytes(index[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("its .idx has no index header")
    head = bytes(index[len(_MAGIC) : _HEADER_BYTES])
    version, code = int.from_bytes(head[:8], "little"), head[8]
    sequences, documents = (
        int.from_bytes(head[9:17], "little"),
        int.from_bytes(head[17:25], "little"),
    )
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"its version is {version} and its type code {code}; only version 1 with integers is "
            "supported"
        )
    sizes = (("int32", sequences), ("int64", sequences), ("int64", documents))
    if len(index) < _HEADER_BYTES + sum(np.dtype(t).itemsize * n for t, n in sizes):
        raise ValueError("its .idx is truncated")
    at, arrays = _HEADER_BYTES, []
    for name, count in sizes:
        stop = at + np.dtype(name).itemsize * count
        arrays.append(np.frombuffer(index[at:stop].tobytes(), dtype=name).astype(np.int64))
        at = stop
    lengths, pointers, borders = arrays
    dtype = np.dtype(_DTYPES[code])
    ends = np.cumsum(lengths)
    if not np.array_equal(pointers[1:], ends[:-1] * dtype.itemsize):
        raise ValueError("its sequences are not contiguous")
    total = int(ends[-1]) if sequences else 0
    size = os.path.getsize(path + ".bin")
    if size != total * dtype.itemsize:
        raise ValueError(f"its .bin has {size} bytes, but its .idx counts {total * dtype.itemsize}")
    if not total:
        raise ValueError("it is empty")
    if documents and (borders.min() < 0 or borders.max() > sequences):
        raise ValueError("its .idx names sequences that it does not have")
    # borders: the first sequence of each document, and one past the last.
    closing = borders[borders > 0]
    tokens: npt.NDArray[np.integer] = np.memmap(
        path + ".bin", dtype=dtype, mode="r", shape=(total,)
    )
    return Documents(
        tokens=tokens, ends=ends[closing - 1] if len(closing) else ends[-1:], trained=None
    )
