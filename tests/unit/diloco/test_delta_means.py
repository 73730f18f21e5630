"""Means of deltas: exact, in the islands' order, and the same whoever comes first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shardwright.diloco.outer_store_channel import CHUNK_BYTES
from shardwright.diloco.round_membership import (
    WINDOW_CHUNKS,
    ChunkMeans,
    RoundAborted,
    chunk_sizes,
    decode_chunk,
    encode_chunk,
    mean,
)

RANDOM = np.random.default_rng(7)


def test_bf16_is_rounded_to_the_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate(
        [
            RANDOM.standard_normal(4096).astype(np.float32),
            np.array(
                [
                    0.0,
                    -0.0,
                    np.inf,
                    -np.inf,
                    np.nan,
                    3.0e38,
                    -3.4e38,
                    1e-40,
                    1.00390625,
                    1.01171875,
                ],
                np.float32,
            ),
            RANDOM.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32),
        ]
    )
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
    found = decode_chunk(encode_chunk(values, "bf16"), "bf16")
    np.testing.assert_array_equal(found, wanted)  # NaN is equal to NaN, and to nothing else


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_mean_of_one_is_itself(precision: str) -> None:
    payload = encode_chunk(RANDOM.standard_normal(100).astype(np.float32), precision)
    assert mean([payload], precision) == payload


def test_sums_are_in_fp32_and_rounded_once() -> None:
    parts = [RANDOM.standard_normal(1000).astype(np.float32) for _ in range(3)]
    sent = [encode_chunk(part, "bf16") for part in parts]
    a, b, c = (decode_chunk(payload, "bf16") for payload in sent)
    assert mean(sent, "bf16") == encode_chunk(((a + b) + c) / np.float32(3), "bf16")


def test_not_a_number_stays_none() -> None:
    parts = [np.array([1.0, np.nan], np.float32), np.array([2.0, 1.0], np.float32)]
    for precision in ("bf16", "fp32"):
        found = decode_chunk(
            mean([encode_chunk(part, precision) for part in parts], precision), precision
        )
        assert found[0] == 1.5 and np.isnan(found[1])


def test_chunks() -> None:
    assert chunk_sizes(0) == [] and chunk_sizes(1) == [1]
    assert chunk_sizes(2 * 2**16 + 4) == [2**16, 2**16, 4]
    assert set(chunk_sizes(2**24)) == {2**18}  # the last one is a small part of the whole
    assert chunk_sizes(2**30 + 4) == [CHUNK_BYTES] * 2**10 + [4]
    assert all(size % 4 == 0 for size in chunk_sizes(4 * 2_097_157))


def test_nobody_gets_far_ahead_of_the_slowest() -> None:
    payloads = {
        m: [encode_chunk(np.full(4, m + n, np.float32), "fp32") for n in range(2 * WINDOW_CHUNKS)]
        for m in (0, 5)
    }
    cell = ChunkMeans([0, 5], [16] * (2 * WINDOW_CHUNKS), "fp32")

    def bring(member: int, numbers: range) -> None:
        for number in numbers:
            cell.deposit(member, number, bytearray(payloads[member][number]))

    bring(0, range(WINDOW_CHUNKS))
    assert cell.lagging_members() == {
        5
    }  # the other may bring no more before it gets something back
    bring(5, range(WINDOW_CHUNKS))
    for number in range(WINDOW_CHUNKS):
        found = cell.take(number, 5.0)
        assert found is not None and decode_chunk(found, "fp32").tolist() == [number + 2.5] * 4
        cell.sent(0, number)
    bring(0, range(WINDOW_CHUNKS, 2 * WINDOW_CHUNKS))
    bring(5, range(WINDOW_CHUNKS, 2 * WINDOW_CHUNKS))
    assert cell.complete and not cell.lagging_members()
    assert cell.take(WINDOW_CHUNKS, 0.01) is None  # 5 has got nothing back
    cell.sent(5, 0)
    assert cell.take(WINDOW_CHUNKS, 5.0) is not None and cell.take(WINDOW_CHUNKS + 1, 0.01) is None


def test_an_abort_frees_who_waits() -> None:
    cell = ChunkMeans([0, 1], [4] * 20, "fp32")
    raised: list[str] = []

    def wait() -> None:
        try:
            cell.take(0, 30.0)
        except RoundAborted:
            raised.append("take")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    cell.abort()
    thread.join(5)
    assert raised == ["take"]
    with pytest.raises(RoundAborted):
        cell.deposit(0, 0, bytearray(4))


@pytest.mark.parametrize(("number", "size"), [(1, 4), (0, 5), (0, 3)])
def test_a_chunk_that_is_not_due(number: int, size: int) -> None:
    with pytest.raises(ValueError):
        ChunkMeans([0], [4, 4], "fp32").deposit(0, number, bytearray(size))
