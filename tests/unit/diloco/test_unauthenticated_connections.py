"""Who does not know the secret says nothing and changes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from shardwright.diloco.outer_store_channel import (
    MAGIC,
    AuthenticatedChannel,
    FrameKind,
    document_of,
    open_channel,
)
from shardwright.utils.authenticated_socket import ChannelError, WrongSecret


def met(
    store_secret: bytes, rank_secret: bytes
) -> tuple[list[object], socket.socket, socket.socket]:
    """What both ends came to: a channel, or what it raised; and their sockets."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(5)
    found: list[object] = [None, None]

    def greet(place: int, secret: bytes) -> None:
        try:
            found[place] = _meet(ends[place], secret, as_store=place == 0)
        except ChannelError as error:
            found[place] = error
            ends[place].close()

    threads = [
        threading.Thread(target=greet, args=each) for each in enumerate((store_secret, rank_secret))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, *ends


def _meet(connection: socket.socket, secret: bytes, *, as_store: bool) -> AuthenticatedChannel:
    return open_channel(connection, secret, as_store=as_store)


def channels() -> tuple[AuthenticatedChannel, AuthenticatedChannel, socket.socket, socket.socket]:
    (store, rank), *ends = met(b"s" * 32, b"s" * 32)
    assert isinstance(store, AuthenticatedChannel) and isinstance(rank, AuthenticatedChannel)
    return store, rank, *ends  # type: ignore[return-value]


def test_frames_both_ways() -> None:
    store, rank, *_ = channels()
    rank.send_document(FrameKind.HELLO, {"island": 1})
    kind, tag, payload = store.receive()
    assert (kind, tag, document_of(payload)) == (FrameKind.HELLO, 0, {"island": 1})
    for number in range(3):
        store.send(FrameKind.MEAN, 7, bytes([number]) * 1000)
        assert rank.receive() == (FrameKind.MEAN, 7, bytearray([number]) * 1000)


def test_another_secret() -> None:
    (store, rank), *_ = met(b"s" * 32, b"t" * 32)
    assert isinstance(store, WrongSecret) and isinstance(rank, ChannelError)


def test_a_store_that_does_not_know_the_secret_is_no_store() -> None:
    """It sends back what it has heard."""
    mine, its = socket.socketpair()
    mine.settimeout(5)

    def echo() -> None:
        its.sendall(its.recv(len(MAGIC) + 32))
        its.sendall(its.recv(2 + 32)[2:])

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(WrongSecret):
        open_channel(mine, b"s" * 32, as_store=False)


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


TAMPERED: dict[str, Callable[[bytes], bytes]] = {
    "payload": flipped,
    "tag": lambda frame: frame[:4] + b"\x09" + frame[5:],
    "mac": lambda frame: frame[:20] + bytes([frame[20] ^ 1]) + frame[21:],
    "replay": lambda frame: frame + frame,
    "length": lambda frame: frame[:5] + b"\xff" * 8 + frame[13:],
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_frame_is_refused(name: str) -> None:
    store, rank, _, rank_end = channels()
    between, far = socket.socketpair()
    rank._socket = between
    rank.send(FrameKind.DELTA, 3, b"some deltas")
    far.settimeout(5)
    frame = far.recv(4096)
    rank_end.sendall(TAMPERED[name](frame))
    with pytest.raises(ChannelError):
        for _ in range(2):
            store.receive()


def test_the_other_directions_frames_are_no_frames() -> None:
    store, _, store_end, rank_end = channels()
    between, far = socket.socketpair()
    store._socket = between
    store.send(FrameKind.MEAN, 3, b"means")
    far.settimeout(5)
    rank_end.sendall(far.recv(4096))
    store._socket = store_end
    with pytest.raises(ChannelError):
        store.receive()


@pytest.mark.parametrize("payload", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_document(payload: bytes) -> None:
    with pytest.raises(ChannelError):
        document_of(payload)
