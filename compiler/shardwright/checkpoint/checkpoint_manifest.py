"""What is inside a checkpoint: every parameter's fragments by Hugging Face name, whatever layout
wrote them. No torch.

A rank writes the elements that it owns, with their optimizer states, into safetensors files of its
own. manifest.json says for each parameter how it was cut over tensor ranks and which file holds
which elements of which shard; SHA256SUMS is what `sha256sum -c` reads. Any layout, and `export`,
reads any of them through it (decisions/015).
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
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_records import read_record

MANIFEST_VERSION = 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
OUTER_ANCHOR = "outer_anchor"
"""A state of an island's checkpoint: the weights at the last outer step, where those of the
checkpoint are others."""
_HASHING_THREADS = 8
_MOST_MANIFEST_BYTES, MOST_CHECKSUMS_BYTES = 2**30, 2**26
"""Ten times what thousands of ranks write."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """Elements [start, start + numel) of a flattened shard: those from `at` of the tensor
    `STATE/NAME` of files[file]. A rank that holds a parameter in pieces has several."""

    file: int
    start: int
    numel: int
    at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """split: how the writer cut it, in Hugging Face's layout. transposed: the shards are stored the
    other way round (weights.conv1d_to_linear). states: fp32, exp_avg and exp_avg_sq of what the
    optimizer updates, value of the rest. experts: equal parts of the first dimension, one for each
    of the writer's expert ranks, each of which `split` cuts. shards: fragments per distinct shard,
    in order of expert and then of tensor ranks, each in order of start."""

    split: ParameterSharding
    transposed: bool
    states: tuple[str, ...]
    shards: tuple[tuple[Fragment, ...], ...]
    experts: int = 1

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
        """Of each part."""
        return 1 if self.split.dimension is None else len(self.split.sizes) // self.split.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """name: relative to the checkpoint."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """step: the last one that was trained. optimizer_step: updates that were made (fp16 skips
    some).

    loss_scale: fp16's scaler, attribute -> value; None where the precision has none. rows: training
    sequences of each part of the data, () where nobody counted them. data: data.path -> digest of
    what it held (data/dataset.py). finite: whether the loss of its step and every trained
    weight are finite numbers.
    """

    version: int
    step: int
    optimizer_step: int
    loss_scale: dict[str, float] | None
    tensors: dict[str, SavedTensor]
    files: tuple[SavedFile, ...]
    rows: tuple[int, ...] = ()
    finite: bool = True
    data: dict[str, str] = field(default_factory=dict)

    def verify(self) -> None:
        """Raises ValueError where it cannot be read: a stranger may have written it."""
        for file in self.files:
            check_name(file.name)
        for name, tensor in self.tensors.items():
            split = tensor.split
            split.verify()
            shards = tensor.experts * tensor.tensor_shard_count
            fragments = [fragment for shard in tensor.shards for fragment in shard]
            if (
                not tensor.has_even_expert_parts
                or len(tensor.shards) != shards
                or (tensor.transposed and len(split.shape) > 2)
            ):
                raise ValueError(f"{MANIFEST} does not say how {name} was cut")
            if any(
                not 0 <= f.file < len(self.files) or min(f.start, f.numel, f.at) < 0
                for f in fragments
            ):
                raise ValueError(f"{MANIFEST} does not say where {name} lies")


def check_name(name: str) -> None:
    """Raises ValueError unless `name` stays in the folder that it is relative to, on every
    system."""
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no name of a file in a checkpoint")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(
        json.dumps(dataclasses.asdict(manifest)) + "\n", encoding="utf-8"
    )


def read_manifest(folder: Path) -> Manifest:
    """Raises OSError, or ValueError where it is none of this version."""
    document = parse_json(read_limited(folder / MANIFEST, _MOST_MANIFEST_BYTES))
    version = document.get("version") if isinstance(document, dict) else None
    if version != MANIFEST_VERSION:
        raise ValueError(f"{MANIFEST} is of version {version}, not {MANIFEST_VERSION}")
    manifest = read_record(Manifest, document)
    manifest.verify()
    return manifest


def is_finite(folder: Path) -> bool:
    """Manifest.finite; False where there is none to read."""
    try:
        return read_manifest(folder).finite
    except (OSError, ValueError):
        return False


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Raises OSError, or ValueError where it is larger."""
    try:
        return read_regular_file(path, most_bytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ValueError(f"{path.name} is larger than {most_bytes // 2**20} MiB") from None


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_text(sums: dict[str, str]) -> str:
    """sums: relative path -> SHA-256 in hexadecimal."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_checksums(folder: Path) -> dict[str, str]:
    """Raises OSError, or ValueError as parse_checksums does."""
    return parse_checksums(read_limited(folder / CHECKSUMS, MOST_CHECKSUMS_BYTES))


def parse_checksums(text: bytes) -> dict[str, str]:
    """Relative path -> SHA-256. Raises ValueError, also for a name that leads out of the folder."""
    sums: dict[str, str] = {}
    for line in text.decode("utf-8").removesuffix("\n").split("\n"):
        digest, _, name = line.partition("  ")
        if not _SHA256.fullmatch(digest) or name in sums:
            raise ValueError(f"{CHECKSUMS} has a line that is no checksum")
        check_name(name)
        sums[name] = digest
    return sums


def damage(folder: Path, *, contents: bool) -> str | None:
    """Why `folder` is not a whole checkpoint, or None. contents: every byte is read, else sizes
    alone."""
    return next(damages(folder, contents=contents), None)


def damages(folder: Path, *, contents: bool) -> Iterator[str]:
    """Each reason. The bytes are read only where all files are there in their sizes."""
    try:
        manifest, sums = read_manifest(folder), read_checksums(folder)
    except (OSError, ValueError) as error:
        yield _in_words(error)
        return
    sizes = {file.name: file.size_bytes for file in manifest.files}
    wrong = list(_wrong_sizes(folder, sums, sizes))
    wrong += [f"{CHECKSUMS} does not name {name}" for name in sorted(set(sizes) - set(sums))]
    yield from wrong
    if contents and not wrong:
        yield from _wrong_contents(folder, sums)


def _wrong_sizes(folder: Path, sums: dict[str, str], sizes: dict[str, int]) -> Iterator[str]:
    for name in sums:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            yield f"{name} is missing"
            continue
        if size != sizes.get(name, size):
            yield f"{name} has {size:,} bytes, not {sizes[name]:,}"


def _wrong_contents(folder: Path, sums: dict[str, str]) -> Iterator[str]:
    """hashlib lets other threads run while it hashes."""
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for (name, wanted), found in zip(
                sums.items(), pool.map(lambda n: checksum(folder / n), sums), strict=True
            ):
                if found != wanted:
                    yield f"{name} is damaged: its bytes are not those that were written (SHA-256)"
        except OSError as error:
            yield f"{error.filename} cannot be read: {error.strerror}"


def _in_words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(str(error.filename)).name} in it"
    return str(error).splitlines()[0]
