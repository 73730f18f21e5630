"""Means of deltas, chunk by chunk, in the order of the islands: the same bytes whoever came
first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW_CHUNKS = 8
"""Chunks that a rank may send ahead of the means that it has got back, and get ahead of the slowest
member."""
_BF16_NAN = np.uint16(0x7FC0)


class RoundAborted(Exception):
    """The round has lost a member."""


def decode_chunk(payload: bytes | bytearray, precision: str) -> npt.NDArray[np.float32]:
    if precision == "fp32":
        return np.frombuffer(payload, dtype="<f4")
    return (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def encode_chunk(values: npt.NDArray[np.float32], precision: str) -> bytes:
    """bf16: rounded to the nearest, ties to even; what is no number stays none."""
    if precision == "fp32":
        return values.astype("<f4", copy=False).tobytes()
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, rounded).astype("<u2").tobytes()


def mean(parts: Sequence[bytes | bytearray], precision: str) -> bytes:
    """Of equally long payloads: added in fp32 in their order, divided once."""
    total = decode_chunk(parts[0], precision).copy()
    for part in parts[1:]:
        total += decode_chunk(part, precision)
    return encode_chunk(total / np.float32(len(parts)), precision)


class ChunkMeans:
    """What the ranks of one number, one in each member, send in a round."""

    def __init__(self, members: Sequence[int], sizes: Sequence[int], precision: str) -> None:
        """sizes: bytes of each chunk."""
        self.members, self.sizes, self.precision = tuple(members), tuple(sizes), precision
        self._parts: dict[int, dict[int, bytearray]] = {}
        self._means: dict[int, bytes] = {}
        self._deposited = dict.fromkeys(self.members, 0)
        self._sent = dict.fromkeys(self.members, 0)
        self._aborted = False
        self._change = threading.Condition()

    @property
    def complete(self) -> bool:
        """Whether every member's chunks are all here."""
        return all(count == len(self.sizes) for count in self._deposited.values())

    def deposited(self, member: int) -> int:
        """Chunks that it has brought."""
        return self._deposited[member]

    def deposit(self, member: int, number: int, payload: bytearray) -> None:
        """Raises Aborted, or ValueError for a chunk that is not due."""
        with self._change:
            if number != self._deposited[member] or len(payload) != self.sizes[number]:
                raise ValueError(f"chunk {number} of {len(payload)} bytes")
            if self._aborted:
                raise RoundAborted
            parts = self._parts.setdefault(number, {})
            parts[member] = payload
            self._deposited[member] = number + 1
            whole = len(parts) == len(self.members)
        if whole:  # the last one adds; nobody else touches these parts
            found = mean([parts[each] for each in self.members], self.precision)
            with self._change:
                del self._parts[number]
                self._means[number] = found
                self._change.notify_all()

    def take(self, number: int, seconds: float) -> bytes | None:
        """The mean of a chunk, once it is there and the slowest member is near; None where it is
        not after so long. Raises Aborted."""

        def is_due() -> bool:
            return number in self._means and number < min(self._sent.values()) + WINDOW_CHUNKS

        with self._change:
            due = self._change.wait_for(lambda: self._aborted or is_due(), seconds)
            if self._aborted:
                raise RoundAborted
            return self._means[number] if due else None

    def lagging_members(self) -> set[int]:
        """Members that could bring a chunk now."""
        with self._change:
            return {
                m
                for m, n in self._deposited.items()
                if n < min(len(self.sizes), self._sent[m] + WINDOW_CHUNKS)
            }

    def sent(self, member: int, number: int) -> None:
        """`member` has got the mean of the chunk."""
        with self._change:
            self._sent[member] = number + 1
            floor = min(self._sent.values())
            for done in [n for n in self._means if n < floor]:
                del self._means[done]
            self._change.notify_all()

    def abort(self) -> None:
        with self._change:
            self._aborted = True
            self._change.notify_all()
