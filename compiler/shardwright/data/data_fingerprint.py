"""Digests what the ranks read, to compare the data of two hosts, or of two days. It needs no
torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shardwright.data.data_preparation import prepared_folder
from shardwright.data.data_sources import all_data_sections
from shardwright.data.image_files import IMAGE_BYTES_FILE, IMAGE_INDEX_FILE
from shardwright.data.indexed_dataset import MANIFEST
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import DataSection

_PREPARED = ("tokens.bin", "documents.bin", "trained.bin", IMAGE_BYTES_FILE, IMAGE_INDEX_FILE)
BLOCK_BYTES, BLOCKS = 2**16, 1024
"""Of a larger file its size and this many blocks, from its first to its last bytes: terabytes are
not read. What was prepared has a digest of all its tokens in its manifest."""


def data_fingerprints(plan: Plan, folder: Path) -> dict[str, str]:
    """Returns data.path -> digest (hex) of each part that is read from files. It was prepared.
    Raises OSError."""
    found: dict[str, str] = {}
    for part in all_data_sections(plan):
        total = hashlib.sha256()
        for path in _files(part, folder):
            total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            _add(total, path)
        if part.kind != "synthetic":
            found[str(part.path)] = total.hexdigest()
    return found


def _files(part: DataSection, folder: Path) -> list[Path]:
    if part.kind == "synthetic":
        return []
    if part.kind == "tokens":
        return [Path(str(part.path))]
    if part.kind == "megatron":
        return [Path(f"{part.path}.idx"), Path(f"{part.path}.bin")]
    here = prepared_folder(part, folder)
    return [path for name in (MANIFEST, *_PREPARED) if (path := here / name).exists()]


def _add(total: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= BLOCKS * BLOCK_BYTES:
            total.update(file.read())
            return
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            total.update(file.read(BLOCK_BYTES))
