"""What is inside a checkpoint: every parameter's fragments by Hugging Face name, whatever layout wrote them. No torch.

A rank writes the elements that it owns, with their optimizer states, into safetensors files of its own. manifest.json
says for each parameter how it was cut over tensor ranks and which file holds which elements of which shard; SHA256SUMS
is what `sha256sum -c` reads. Any layout, and `export`, reads any of them through it (decisions/015).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardwright.ir.partition import ParameterSplit

MANIFEST_VERSION = 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
TRAINED = ("fp32", "exp_avg", "exp_avg_sq")
"""States of a parameter that the optimizer updates: master weight and Adam's moments."""
CONSTANT = ("value",)
"""The one state of what is not trained: frozen parameters, persistent buffers."""
_HASHING_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Elements [start, start + numel) of a flattened shard; the tensor `STATE/NAME` of files[file]."""

    file: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """split: how the writer cut it, in Hugging Face's layout. transposed: the shards are stored the other way round
    (weights.conv1d_to_linear). shards: fragments per distinct shard, in order of tensor ranks, each in order of start.
    """

    split: ParameterSplit
    transposed: bool
    states: tuple[str, ...]
    shards: tuple[tuple[Fragment, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """name: relative to the checkpoint."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """step: the last one that was trained. optimizer_step: updates that were made (fp16 skips some).

    loss_scale: fp16's scaler, attribute -> value; None where the precision has none.
    rows: training sequences of each part of the data, () where nobody counted them.
    """

    version: int
    step: int
    optimizer_step: int
    loss_scale: dict[str, float] | None
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]
    rows: tuple[int, ...] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest)) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Raises OSError, or ValueError (pydantic's ValidationError is one) where it is none of this version."""
    from pydantic import TypeAdapter

    text = (folder / MANIFEST).read_text(encoding="utf-8")
    version = json.loads(text).get("version")
    if version != MANIFEST_VERSION:
        raise ValueError(f"{MANIFEST} is of version {version}, not {MANIFEST_VERSION}")
    return TypeAdapter(Manifest).validate_json(text)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_text(sums: dict[str, str]) -> str:
    """sums: relative path -> SHA-256 in hexadecimal."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_checksums(folder: Path) -> dict[str, str]:
    """Raises OSError or ValueError."""
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("  ", 1) for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{CHECKSUMS} has a line that is no checksum")
    return {name: digest for digest, name in pairs}


def damage(folder: Path, *, contents: bool) -> str | None:
    """Why `folder` is not a whole checkpoint, or None. contents: every byte is read, else sizes alone."""
    try:
        manifest, sums = read_manifest(folder), read_checksums(folder)
    except (OSError, ValueError) as error:
        return _in_words(error)
    sizes = {file.name: file.size_bytes for file in manifest.files}
    for name in sums:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != sizes.get(name, size):
            return f"{name} has {size:,} bytes, not {sizes[name]:,}"
    if missing := sorted(set(sizes) - set(sums)):
        return f"{CHECKSUMS} does not name {missing[0]}"
    return next(_wrong_contents(folder, sums), None) if contents else None


def _wrong_contents(folder: Path, sums: dict[str, str]) -> Iterator[str]:
    """hashlib lets other threads run while it hashes."""
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for (name, wanted), found in zip(sums.items(), pool.map(lambda n: checksum(folder / n), sums), strict=True):
                if found != wanted:
                    yield f"{name} is damaged: its bytes are not those that were written (SHA-256)"
        except OSError as error:
            yield f"{error.filename} cannot be read: {error.strerror}"


def _in_words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(str(error.filename)).name} in it"
    return str(error).splitlines()[0]
