"""Reads Megatron's indexed datasets: NAME.bin holds the ids, NAME.idx the lengths of its sequences
and the documents.

megatron-core 0.16 writes them so (core/datasets/indexed_dataset.py, _IndexWriter).
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from shardwright.data.indexed_dataset import Documents
from shardwright.diagnostics import refusal

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8


def open_megatron(path: str) -> Documents:
    """Opens the dataset at `path`, which is without the endings. Raises Refusal (SW6119)."""
    try:
        return _open(path)
    except (OSError, ValueError) as error:
        raise refusal(
            "SW6119",
            f"{path!r} is no indexed dataset of Megatron: {error}",
            (
                "Give the path that preprocess_data.py wrote, without .idx and .bin; both files "
                "must be there."
            ),
        ) from None


def _open(path: str) -> Documents:
    index = np.memmap(path + ".idx", dtype=np.uint8, mode="r")
    if len(index) < _HEADER_BYTES or bytes(index[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("its .idx does not begin as one")
    head = bytes(index[len(_MAGIC) : _HEADER_BYTES])
    version, code = int.from_bytes(head[:8], "little"), head[8]
    sequences, documents = (
        int.from_bytes(head[9:17], "little"),
        int.from_bytes(head[17:25], "little"),
    )
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"its version is {version} and its type has the code {code}; read are version 1 and "
            "integers"
        )
    sizes = (("int32", sequences), ("int64", sequences), ("int64", documents))
    if len(index) < _HEADER_BYTES + sum(np.dtype(t).itemsize * n for t, n in sizes):
        raise ValueError("its .idx is cut short")
    at, arrays = _HEADER_BYTES, []
    for name, count in sizes:
        stop = at + np.dtype(name).itemsize * count
        arrays.append(np.frombuffer(index[at:stop].tobytes(), dtype=name).astype(np.int64))
        at = stop
    lengths, pointers, borders = arrays
    dtype = np.dtype(_DTYPES[code])
    ends = np.cumsum(lengths)
    if not np.array_equal(pointers[1:], ends[:-1] * dtype.itemsize):
        raise ValueError("its sequences do not lie one behind the other")
    total = int(ends[-1]) if sequences else 0
    size = os.path.getsize(path + ".bin")
    if size != total * dtype.itemsize:
        raise ValueError(f"its .bin has {size} bytes, the .idx counts {total * dtype.itemsize}")
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
