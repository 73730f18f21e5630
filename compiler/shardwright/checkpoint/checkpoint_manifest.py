"""Describe a checkpoint: the fragments of every parameter by Hugging Face name, whatever layout
wrote them. No torch.

Each rank writes its owned elements and optimizer states into its own safetensors files.
manifest.json records how each parameter was split over tensor ranks, and which file holds which
elements. SHA256SUMS is in the format of `sha256sum -c`. Any layout, and `export`, can read it
(decisions/015).
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.utils.file_io import open_regular_file, parse_strict_json, read_regular_file
from shardwright.utils.json_values import read_record

MANIFEST_VERSION = 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
OUTER_ANCHOR = "outer_anchor"
"""State of an island's checkpoint: the weights at the last outer step, where the checkpoint's own
differ."""
_HASHING_THREADS = 8
_MOST_MANIFEST_BYTES, MOST_CHECKSUMS_BYTES = 2**30, 2**26
"""Size limits: ten times what thousands of ranks write."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Elements [start, start + numel) of a flattened shard, stored from `at` in the tensor
    `STATE/NAME` of files[file]."""

    file: int
    start: int
    numel: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Describe a saved parameter.

    split: how the writer split it, in Hugging Face's layout.
    transposed: whether shards are stored transposed (conv1d_to_linear).
    states: fp32 and the optimizer's moments of trained parameters, value of others.
    experts: equal parts of the first dimension, one for each of the writer's expert ranks, each
        split by `split`.
    shards: fragments of each distinct shard, by expert rank, then tensor rank, then start.
    """

    split: ParameterSharding
    transposed: bool
    states: tuple[str, ...]
    shards: tuple[tuple[Fragment, ...], ...]
    experts: int

    @property
    def has_even_expert_parts(self) -> bool:
        if self.experts == 1:
            return True
        first = (
            self.split.shape[0]
            if self.split.shape and self.split.dimension != 0 and not self.transposed
            else 0
        )
        return self.experts > 1 and first > 0 and first % self.experts == 0

    @property
    def tensor_shard_count(self) -> int:
        """Return the number of shards of each expert part."""
        return 1 if self.split.dimension is None else len(self.split.sizes) // self.split.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """Name a file, relative to the checkpoint, with its size (bytes)."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describe a checkpoint.

    step: last trained step.
    optimizer_step: optimizer updates (fp16 skips some).
    loss_scale: fp16's scaler, attribute -> value; None for other precisions.
    rows: training sequences of each part of the data, () where not counted.
    data: data.path -> digest of its content (data/dataset.py).
    finite: whether the step's loss and every trained weight are finite.
    """

    version: int
    step: int
    optimizer_step: int
    loss_scale: dict[str, float] | None
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]
    rows: tuple[int, ...]
    finite: bool
    data: dict[str, str]

    def verify(self) -> None:
        """Raise ValueError where it is inconsistent: its file is untrusted input."""
        for file in self.files:
            check_name(file.name)
        for name, tensor in self.tensors.items():
            split = tensor.split
            split.verify()
            shards = tensor.experts * tensor.tensor_shard_count
            if (
                not tensor.has_even_expert_parts
                or len(tensor.shards) != shards
                or (tensor.transposed and len(split.shape) > 2)
                or not tensor.states
                or min(split.shape, default=0) < 0
            ):
                raise ValueError(f"{MANIFEST} does not say how {name} was split")
            numels = [
                split.shard_numel(number % tensor.tensor_shard_count * split.copies)
                // tensor.experts
                for number in range(shards)
            ]
            if any(
                not 0 <= f.file < len(self.files)
                or min(f.start, f.numel, f.at) < 0
                or f.start + f.numel > numel
                for numel, shard in zip(numels, tensor.shards, strict=True)
                for f in shard
            ):
                raise ValueError(f"{MANIFEST} does not say where {name} is stored")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` stays in the folder that it is relative to, on every
    system."""
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a valid name of a file in a checkpoint")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(
        json.dumps(dataclasses.asdict(manifest)) + "\n", encoding="utf-8"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises OSError, or ValueError where it is invalid or of another
    version."""
    document = parse_strict_json(read_limited(folder / MANIFEST, _MOST_MANIFEST_BYTES))
    version = document.get("version") if isinstance(document, dict) else None
    if version != MANIFEST_VERSION:
        raise ValueError(f"{MANIFEST} has version {version}, not {MANIFEST_VERSION}")
    manifest = read_record(Manifest, document)
    manifest.verify()
    return manifest


def is_finite(folder: Path) -> bool:
    """Return Manifest.finite, False where there is no readable manifest."""
    try:
        return read_manifest(folder).finite
    except (OSError, ValueError):
        return False


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Read a file. Raises OSError, or ValueError where it is larger than `most_bytes`."""
    try:
        return read_regular_file(path, most_bytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ValueError(f"{path.name} is larger than {most_bytes // 2**20} MiB") from None


def checksum(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_text(sums: dict[str, str]) -> str:
    """Format checksums.

    sums: relative path -> SHA-256 (hex).
    """
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums. Raises OSError, and ValueError as parse_checksums does."""
    return parse_checksums(read_limited(folder / CHECKSUMS, MOST_CHECKSUMS_BYTES))


def parse_checksums(text: bytes) -> dict[str, str]:
    """Return relative path -> SHA-256. Raises ValueError for an invalid line or a name outside the
    folder."""
    sums: dict[str, str] = {}
    for line in text.decode("utf-8").removesuffix("\n").split("\n"):
        digest, _, name = line.partition("  ")
        if not _SHA256.fullmatch(digest) or name in sums:
            raise ValueError(f"{CHECKSUMS} has an invalid line")
        check_name(name)
        sums[name] = digest
    return sums


def damage(folder: Path, *, contents: bool) -> str | None:
    """Return why `folder` is not a complete checkpoint, or None.

    contents: whether to read every byte, or only compare sizes.
    """
    return next(damages(folder, contents=contents), None)


def damages(folder: Path, *, contents: bool) -> Iterator[str]:
    """Yield each reason. The bytes are read only where all files exist with their sizes."""
    try:
        manifest, sums = read_manifest(folder), read_checksums(folder)
    except FileNotFoundError as error:
        yield f"{Path(str(error.filename)).name} is missing"
        return
    except (OSError, ValueError) as error:
        yield str(error).splitlines()[0]
        return
    sizes = {file.name: file.size_bytes for file in manifest.files}
    wrong = []
    for name in sums:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if size != sizes.get(name, size):
            wrong.append(f"{name} has {size:,} bytes, not {sizes[name]:,}")
    wrong += [f"{CHECKSUMS} does not name {name}" for name in sorted(set(sizes) - set(sums))]
    yield from wrong
    if wrong or not contents:
        return
    # hashlib releases the GIL while it hashes.
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for (name, expected), digest in zip(
                sums.items(), pool.map(lambda n: checksum(folder / n), sums), strict=True
            ):
                if digest != expected:
                    yield f"{name} is damaged: its SHA-256 differs from the one that was written"
        except OSError as error:
            yield f"{error.filename} cannot be read: {error.strerror}"
