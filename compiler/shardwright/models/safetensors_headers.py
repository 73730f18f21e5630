"""What safetensors files hold, read from their headers: names, types, shapes and places. No torch
here, and no tensor is loaded, whatever the size of the files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwright.utils.bounded_read import parse_json, read_regular_file
from shardwright.utils.json_types import JsonObject

if TYPE_CHECKING:
    import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of a tensor that can be trained."""
MOST_HEADER_BYTES = 100 * 2**20
"""safetensors' own limit."""
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """start, stop: bytes in the file, counted from its begin."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeaders:
    """tensors: by the files' own names. problem: why the files contradict each other or their
    index, "" where they do not. total_size: the index's own count of bytes; None where there is
    none."""

    folder: Path
    tensors: Mapping[str, TensorHeader]
    problem: str
    total_size: int | None

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.stop - tensor.start for tensor in self.tensors.values())


def weight_file_names(folder: Path) -> tuple[str, ...]:
    """Files that from_pretrained reads: one file where it is there, else those of the index. Raises
    OSError and ValueError for an index that cannot be read."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return (SINGLE,)
    return tuple(sorted({file for _, file in _weight_map(folder)}))


def read_headers(folder: Path) -> WeightHeaders:
    """Raises OSError and ValueError for a file that is missing, cut off or no safetensors file."""
    tensors: dict[str, TensorHeader] = {}
    problems: list[str] = []
    for file in weight_file_names(folder):
        for name, tensor in _read_header(folder, file):
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    total = None
    if not (folder / SINGLE).exists():
        for name, file in _weight_map(folder):
            if name not in tensors:
                problems.append(f"the index names {name}, and {file} does not hold it")
        total = _total_size(folder)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    problem = f"{problems[0]}{more}" if problems else ""
    return WeightHeaders(folder=folder, tensors=tensors, problem=problem, total_size=total)


def same_values(headers: WeightHeaders, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers, as torch.equal has it: NaN differs from itself.
    Reads block by block up to the first difference."""
    import numpy as np  # here: `check` reads headers alone, and fast

    a, b = headers.tensors[first], headers.tensors[second]
    if a.shape != b.shape or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    with open(headers.folder / a.file, "rb") as left, open(headers.folder / b.file, "rb") as right:
        return all(
            np.array_equal(x, y) for x, y in zip(_values(left, a), _values(right, b), strict=True)
        )


def _values(file: Any, tensor: TensorHeader) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """float64 blocks of as many elements, whatever the type. bf16 is the upper half of an fp32
    number."""
    import numpy as np

    width = {"F64": 8, "F32": 4}.get(tensor.dtype, 2)
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    file.seek(tensor.start)
    left, elements = (tensor.stop - tensor.start) // width, _BLOCK_BYTES // 8
    while left > 0:
        count = min(left, elements)
        block = np.frombuffer(file.read(count * width), dtype=kinds[tensor.dtype])
        if tensor.dtype == "BF16":
            block = (block.astype(np.uint32) << 16).view(np.float32)
        yield block.astype(np.float64)
        left -= count


def _read_header(folder: Path, file: str) -> Iterator[tuple[str, TensorHeader]]:
    path = folder / file
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file} is no safetensors file, or was cut off")
        header = parse_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} has no safetensors header")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _stored(file, name, entry, 8 + length, size)


def _stored(file: str, name: str, entry: object, begin: int, size: int) -> TensorHeader:
    try:
        found = cast("dict[str, Any]", entry)
        start, stop = (begin + int(at) for at in found["data_offsets"])
        shape = tuple(int(length) for length in found["shape"])
        dtype = str(found["dtype"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: the header's entry of {name} cannot be read") from None
    if not begin <= start <= stop <= size:
        raise ValueError(f"{file} was cut off: {name} ends behind its end")
    return TensorHeader(file=file, dtype=dtype, shape=shape, start=start, stop=stop)


def _index(folder: Path) -> JsonObject:
    index = parse_json(read_regular_file(folder / INDEX, MOST_HEADER_BYTES))
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{INDEX} has no weight_map")
    return index


def _weight_map(folder: Path) -> Iterable[tuple[str, str]]:
    weight_map = cast("dict[str, object]", _index(folder)["weight_map"])
    if any(
        not isinstance(file, str) or "/" in file or file.startswith(".")
        for file in weight_map.values()
    ):
        raise ValueError(f"{INDEX} names files outside its folder")
    return [(name, str(file)) for name, file in weight_map.items()]


def _total_size(folder: Path) -> int | None:
    metadata = _index(folder).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if isinstance(total, int) and not isinstance(total, bool) else None
