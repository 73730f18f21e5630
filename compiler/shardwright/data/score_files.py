"""Read and write score files: the log-probabilities that `shardwright score` computes, token by
token.

A score file is a folder: manifest.json and blocks of sequences in safetensors. Nothing here imports
torch. S: training.sequence_length; K: `--top`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.sequences import Indices, SequenceBatch, SequenceDataset
from shardwright.diagnostics import Refusal, refusal
from shardwright.utils.file_io import write_atomically

FORMAT, MANIFEST = 1, "manifest.json"
TRAIN, VALIDATION = "train", "validation"

_DTYPES = {"I32": np.int32, "I64": np.int64, "F32": np.float32}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}

Arrays = Mapping[str, npt.NDArray[np.generic]]

OPEN_BLOCKS = 1024
"""Blocks that a rank maps at once: Linux allows a process 65,530 maps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopScores:
    """Hold the largest log-probabilities of some sequences, at their labels' places.

    is_label: (B, S) bool. Elsewhere the other arrays are 0.
    ids: (B, S, K) int32 token ids, the most likely first.
    log_probabilities: (B, S, K) float32, logits minus their normalizer.
    normalizers: (B, S) float32, the logarithm of the sum of all exponentials.

    Place s has what the logits of token s - 1 say of token s: the next token's label stands there.
    """

    is_label: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.int32]
    log_probabilities: npt.NDArray[np.float32]
    normalizers: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Describe a block of sequences [start, stop).

    tokens: labels.
    log_probability: the sum of its labels'.
    sha256: of its tensors' bytes.
    """

    file: str
    start: int
    stop: int
    tokens: int
    log_probability: float
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartManifest:
    """Describe the scores of the training or of the validation data.

    sequences: how many there are, an example's one after the other.
    loss: the mean negative log-probability of a label.
    """

    sequences: int
    tokens: int
    loss: float
    blocks: tuple[Block, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreManifest:
    """Describe a score file.

    digests: of what DIGESTS names.
    top: K, 0 without `--top`.
    """

    format: int
    digests: Mapping[str, str]
    top: int
    sequence_length: int
    sequences_per_example: int
    parts: Mapping[str, PartManifest]


COLUMNS = ("places", "label_log_probabilities", "normalizers", "ids", "log_probabilities")
"""Name the arrays of a block that have a row for each label, in the order of its checksums."""

DIGESTS = {
    "weights": "the model's weights",
    "tokenizer": "the tokenizer",
    "template": "the chat template",
    "data": "the data",
    "settings": "the sequence length, the packing or the held-out share",
    "precision": "the precision",
}
"""Name what each digest is of."""


def write_block(path: Path, start: int, arrays: Arrays) -> Block:
    """Write a safetensors file whole or not at all. Its metadata has the checksum of its tensors'
    bytes.

    start: the first sequence's number
    """
    header: dict[str, object] = {}
    at, total, parts = 0, hashlib.sha256(), []
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
        total.update(data)
        parts.append(data)
    header["__metadata__"] = {"sha256": total.hexdigest()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in parts:
            file.write(data)
    os.replace(temporary, path)
    return describe_block(path.name, start, arrays, total.hexdigest())


def describe_block(file: str, start: int, arrays: Arrays, sha256: str) -> Block:
    """Describe a block whose first sequence is number `start`."""
    own = arrays["label_log_probabilities"]
    return Block(
        file=file,
        start=start,
        stop=start + len(arrays["offsets"]) - 1,
        tokens=len(own),
        log_probability=float(own.astype(np.float64).sum()),
        sha256=sha256,
    )


def map_block(path: Path) -> tuple[Arrays, str] | None:
    """Map a block's arrays, and read the checksum that its metadata has; None where it is absent or
    has another size. Reads its header alone."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return None
            header = json.loads(file.read(length))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        told = str(header.pop("__metadata__")["sha256"])
        if len(data) != max(entry["data_offsets"][1] for entry in header.values()):
            return None
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            arrays[name] = data[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (arrays, told) if {"offsets", "checksums"} <= arrays.keys() else None


def read_block(path: Path) -> tuple[Arrays, str] | None:
    """Map a block's arrays; None where it is absent or not what was written. Reads all of it."""
    found = map_block(path)
    if found is None:
        return None
    total = hashlib.sha256()
    for array in found[0].values():
        total.update(array.data)
    return found if total.hexdigest() == found[1] else None


def _sequence_checksum(arrays: Arrays, own: slice) -> int:
    """Return the CRC-32 of what a sequence's labels have."""
    total = 0
    for name in COLUMNS:
        if name in arrays:
            total = zlib.crc32(arrays[name][own].data, total)
    return total


def pack_block(
    is_label: npt.NDArray[np.bool_], values: npt.NDArray[np.float32], top: int
) -> Arrays:
    """Return a block's arrays: what its labels have, sequence by sequence.

    values: (B, S) log-probabilities; with `top` (B, S, 2 + 2 K): log-probability, normalizer, ids
        and log-probabilities of the largest
    """
    counts = is_label.sum(axis=1)
    own = values[is_label]
    found: dict[str, npt.NDArray[np.generic]] = {
        "offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "places": np.nonzero(is_label)[1].astype(np.int32),
        "label_log_probabilities": own[:, 0] if top else own,
    }
    if top:
        found |= {
            "normalizers": own[:, 1],
            "ids": own[:, 2 : 2 + top].astype(np.int32),
            "log_probabilities": own[:, 2 + top :],
        }
    found = {name: np.ascontiguousarray(array) for name, array in found.items()}
    offsets = found["offsets"].tolist()
    found["checksums"] = np.array(
        [_sequence_checksum(found, slice(*both)) for both in itertools.pairwise(offsets)],
        dtype=np.int64,
    )
    return found


def write_manifest(folder: Path, manifest: ScoreManifest) -> None:
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=1))


def is_score_file(path: Path) -> bool:
    """Return whether this is a folder that `shardwright score` wrote."""
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"digests", "parts", "top"} <= found.keys()


class ScoreFile:
    """Read a score file. Raises SW6270 where it is none, or where a block is damaged."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            found = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']}, not {FORMAT}")
            parts = {
                name: PartManifest(
                    **{**part, "blocks": tuple(Block(**block) for block in part["blocks"])}
                )
                for name, part in found["parts"].items()
            }
            self.manifest = ScoreManifest(**{**found, "parts": parts})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refusal(
                "SW6270",
                f"{str(path)!r} is no score file: {error}",
                "Give a folder that `shardwright score RECIPE -o FILE` wrote.",
            ) from None

    def check(self, expected: Mapping[str, str]) -> None:
        """Raise SW6271 where the scores are of something else.

        expected: of DIGESTS, those that must be equal
        """
        own = self.manifest.digests
        differing = [name for name in expected if own.get(name) != expected[name]]
        if differing:
            told = "; ".join(
                f"{DIGESTS[name]} ({name} {str(own.get(name))[:12]}, here {expected[name][:12]})"
                for name in differing
            )
            raise refusal(
                "SW6271",
                f"the scores in {str(self.path)!r} differ from this run in {told}",
                "Score this recipe's data again: `shardwright score RECIPE -o FILE`.",
            )

    def check_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (blocks checked, all blocks): each is there, has its size, and is the one that the
        manifest names. Reads headers alone. Raises SW6270."""
        blocks = [b for part in self.manifest.parts.values() for b in part.blocks]
        with ThreadPoolExecutor(16) as pool:  # for the latency of network file systems
            opened = pool.map(lambda block: _open_block(self.path, block, map_block), blocks)
            for number, _ in enumerate(opened, 1):
                yield number, len(blocks)

    def part(self, name: str) -> PartScores:
        """Return the scores of TRAIN or VALIDATION."""
        return PartScores(self.path, self.manifest, self.manifest.parts[name])


@dataclass(frozen=True, slots=True)
class TaughtSequences:
    """Read sequences with what a teacher says of them."""

    rows: SequenceDataset
    teacher: PartScores

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Indices) -> SequenceBatch:
        top = self.teacher.top(indices)
        return replace(self.rows.read(indices), teacher=(top.ids, top.log_probabilities))


class PartScores:
    """Read the scores of sequences by their indices. Blocks are mapped. Raises SW6270 where what is
    read is damaged: of a sequence its own bytes are checked, at each read."""

    def __init__(self, path: Path, manifest: ScoreManifest, part: PartManifest) -> None:
        self._path, self._manifest, self._part = path, manifest, part
        self._starts = np.array([block.start for block in part.blocks], dtype=np.int64)
        self._arrays = functools.lru_cache(OPEN_BLOCKS)(self._map)

    def __len__(self) -> int:
        return self._part.sequences

    def sums(
        self, completions: Callable[[Indices], Indices] | None = None
    ) -> tuple[npt.NDArray[np.float64], Indices]:
        """Return each completion's log-probability, in fp64, and where those of each sequence
        begin: (sequences + 1,).

        completions: of sequences, which completion each token belongs to (B, S), from 0; None where
            each sequence is one
        """
        found, counts = [], []
        for block in self._part.blocks:
            arrays, count = _open_block(self._path, block, read_block), block.stop - block.start
            owners, each = np.repeat(np.arange(count), np.diff(arrays["offsets"])), np.ones(count)
            if completions is not None:
                numbers = completions(np.arange(block.start, block.stop))
                each = numbers.max(axis=1) + 1
                owners = (np.cumsum(each) - each)[owners] + numbers[owners, arrays["places"]]
            own = arrays["label_log_probabilities"].astype(np.float64)
            found.append(np.bincount(owners, own, int(each.sum())))
            counts.append(each)
        firsts = np.cumsum(np.concatenate([[0], *counts])).astype(np.int64)
        return np.concatenate([np.zeros(0), *found]), firsts

    def label_log_probabilities(self, sequences: Indices) -> npt.NDArray[np.float32]:
        """Return (B, S), 0 where a token is no label."""
        found = np.zeros((len(sequences), self._manifest.sequence_length), dtype=np.float32)
        for row, (arrays, own) in enumerate(map(self._find, sequences.tolist())):
            found[row, arrays["places"][own]] = arrays["label_log_probabilities"][own]
        return found

    def top(self, sequences: Indices) -> TopScores:
        """Return the K largest of each label's place. Raises SW6270 for scores without `--top`."""
        k = self._manifest.top
        if not k:
            raise refusal(
                "SW6270",
                f"{str(self._path)!r} has the labels' log-probabilities alone",
                "Score again with `--top K`.",
            )
        shape = (len(sequences), self._manifest.sequence_length)
        found = TopScores(
            is_label=np.zeros(shape, dtype=np.bool_),
            ids=np.zeros((*shape, k), dtype=np.int32),
            log_probabilities=np.zeros((*shape, k), dtype=np.float32),
            normalizers=np.zeros(shape, dtype=np.float32),
        )
        for row, (arrays, own) in enumerate(map(self._find, sequences.tolist())):
            places = arrays["places"][own]
            found.is_label[row, places] = True
            found.ids[row, places] = arrays["ids"][own]
            found.log_probabilities[row, places] = arrays["log_probabilities"][own]
            found.normalizers[row, places] = arrays["normalizers"][own]
        return found

    def _find(self, sequence: int) -> tuple[Arrays, slice]:
        """Return the block of a sequence, and the sequence's labels in it."""
        number = int(np.searchsorted(self._starts, sequence, side="right")) - 1
        block = self._part.blocks[number]
        arrays, at = self._arrays(number), sequence - block.start
        own = slice(*arrays["offsets"][at : at + 2].tolist())
        if _sequence_checksum(arrays, own) != arrays["checksums"][at]:
            raise _damaged(self._path / block.file, f"at sequence {sequence}")
        return arrays, own

    def _map(self, number: int) -> Arrays:
        return _open_block(self._path, self._part.blocks[number], map_block)


def _open_block(
    folder: Path, block: Block, reader: Callable[[Path], tuple[Arrays, str] | None]
) -> Arrays:
    """Return a block's arrays. Raises SW6270 where the reader finds another block or none."""
    found = reader(folder / block.file)
    if found is None or found[1] != block.sha256:
        raise _damaged(folder / block.file, "or missing")
    return found[0]


def _damaged(path: Path, place: str) -> Refusal:
    return refusal(
        "SW6270",
        f"{str(path)!r} is damaged {place}: its checksum is not the one that was written",
        "Copy the score file again, or delete it and score again.",
    )


def part_manifest(blocks: Sequence[Block]) -> PartManifest:
    """Sum up the blocks of a part."""
    tokens = sum(block.tokens for block in blocks)
    total = sum(block.log_probability for block in blocks)
    return PartManifest(
        sequences=blocks[-1].stop if blocks else 0,
        tokens=tokens,
        loss=-total / tokens if tokens else math.nan,
        blocks=tuple(blocks),
    )
