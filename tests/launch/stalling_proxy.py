"""A way to the outer store that stops an island's deltas in the middle of a chunk."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading

from shardwright.diloco.outer_store_channel import MAGIC, FrameKind
from shardwright.utils.authenticated_socket import (
    HELLO_SIZE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    read_exactly,
)

_HEADER, _MAC = struct.Struct(">BIQ"), 32
_HANDSHAKE_BYTES = len(MAGIC) + NONCE_BYTES + HELLO_SIZE_BYTES + PROOF_BYTES


class Turnpike:
    """Passes on what comes to one port to another one. Of `island`, in its `attempt`-th round,
    every rank's chunk of this number goes through by half, and nothing after it. stopped: once all
    of its ranks have come so far."""

    def __init__(
        self, port: int, to: int, *, island: int, ranks: int, attempt: int, chunk: int
    ) -> None:
        self._to, self._island, self._attempt, self._chunk = to, island, attempt, chunk
        self._left, self._lock = ranks, threading.Lock()
        self.stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                rank, _ = self._listener.accept()
                store = socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(target=self._down, args=(store, rank), daemon=True).start()
                threading.Thread(target=self._up, args=(rank, store), daemon=True).start()

    def _down(self, store: socket.socket, rank: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := store.recv(2**16):
                rank.sendall(some)
        _hang_up(store, rank)

    def _up(self, rank: socket.socket, store: socket.socket) -> None:
        """Ends with the rank, whose death the store hears of at once."""
        with contextlib.suppress(Exception):
            store.sendall(read_exactly(rank, _HANDSHAKE_BYTES))
            island, chunks = None, 0
            while True:
                head = read_exactly(rank, _HEADER.size + _MAC)
                kind, attempt, length = _HEADER.unpack(head[: _HEADER.size])
                payload = read_exactly(rank, length)
                if kind == FrameKind.HELLO:
                    island = json.loads(payload)["island"]
                if kind == FrameKind.DELTA and (island, attempt) == (self._island, self._attempt):
                    if chunks == self._chunk:
                        store.sendall(head + payload[: length // 2])
                        self._arrived()
                        while rank.recv(2**16):  # until it dies
                            pass
                    chunks += 1
                store.sendall(head + payload)
        _hang_up(rank, store)

    def _arrived(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.stopped.set()


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
