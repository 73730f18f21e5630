"""Frames between a rank and the outer store, over one authenticated TCP connection each.

Each frame carries an HMAC-SHA256 over a key of this connection, its direction and its number:
nobody without the secret joins, changes or replays a frame. Nothing is encrypted: who can read the
link can read the deltas.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from shardwright.diagnostics import refusal
from shardwright.utils.authenticated_socket import (
    HANDSHAKE_SECONDS,
    ChannelError,
    Handshake,
    authenticate,
    read_exactly,
)
from shardwright.utils.file_io import write_atomically

# The secret that the outer store and every rank know: a file of each island's folder.


SECRET_FILE = "run/outer.secret"
_MIN_SECRET_CHARACTERS = 16


def read_secret(folder: Path) -> bytes:
    """folder: an island's. Raises Refusal: SW6313."""
    path = folder / SECRET_FILE
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        why = f"{str(path)!r} cannot be read: {error.strerror}"
    else:
        if len(secret) >= _MIN_SECRET_CHARACTERS:
            return secret
        why = f"{str(path)!r} has {len(secret)} characters, fewer than {_MIN_SECRET_CHARACTERS}"
    raise refusal(
        "SW6313",
        f"no secret for the outer store: {why}",
        (
            "Start `shardwright outer-store DIR` first: it writes the secret to every "
            "island's folder on its machine. Copy the file to the same path of the folder at "
            "the other sites."
        ),
    )


def distribute_secret(folder: Path, islands: list[Path]) -> bytes:
    """The compiled folder's, made where it has none, and put into each island's folder that is
    here. Raises Refusal: SW6313, SW6322."""
    path = folder / SECRET_FILE
    if not path.exists():
        _write(path, secrets.token_hex(32).encode("ascii"))
    secret = read_secret(folder)
    for island in islands:
        if island.is_dir():
            _write(island / SECRET_FILE, secret)
    return secret


def _write(path: Path, secret: bytes) -> None:
    """Write a secret that this user alone can read. Raises Refusal: SW6322."""
    text = secret.decode("ascii") + "\n"
    try:
        if path.exists() and path.read_text() == text and path.stat().st_mode & 0o077 == 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, mode=0o600)
    except OSError as error:
        raise refusal(
            "SW6322",
            (
                f"the outer store's secret cannot be written to {str(path)!r}: "
                f"{error.strerror or error}"
            ),
            (
                "Free disk space, or give this user write permission, and start `shardwright "
                "outer-store` again."
            ),
        ) from None


MAGIC = b"shardwright-outer-3\n"
CHUNK_BYTES = 2**20
"""Bounds the payload of a frame."""
_MAX_FRAME_BYTES = 4 * CHUNK_BYTES
_HEADER = struct.Struct(">BIQ")


class FrameKind(enum.IntEnum):
    """Names the kinds of frames.

    A rank sends HELLO, ARRIVE, DELTA, STATE, BYE, or PROBE in HELLO's place (link_probe.py). The
    store sends the others, and passes STATE on.
    """

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ARRIVE = 4
    WAIT = 5
    GO = 6
    EXCHANGE = 7
    DELTA = 8
    MEAN = 9
    COMMIT = 10
    RETRY = 11
    RECEIVE = 12
    STATE = 13
    STATE_END = 14
    BYE = 15
    PROBE = 16
    PROBED = 17


class AuthenticatedChannel:
    """Sends and receives frames on one authenticated connection. Several threads may send, one at a
    time receives. heard: when the last bytes came, by the monotonic clock."""

    def __init__(
        self, connection: socket.socket, key: bytes, sends: bytes, receives: bytes
    ) -> None:
        self._socket, self._key = connection, key
        self._directions = {"send": sends, "receive": receives}
        self._sent = self._received = 0
        self.heard = time.monotonic()
        self._lock = threading.Lock()

    def send(
        self, kind: FrameKind, tag: int = 0, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Raises ChannelError, also where the other side takes nothing for the socket's timeout."""
        with self._lock:
            header = _HEADER.pack(kind, tag, len(payload))
            mac = self._mac("send", self._sent, header, payload)
            self._sent += 1
            try:
                self._push(header + mac)
                self._push(payload)
            except OSError as error:
                raise ChannelError(str(error)) from None

    def _push(self, payload: bytes | bytearray | memoryview) -> None:
        """Send as sendall does, but with a timeout for each part: a slow link is not a silent
        one."""
        rest = memoryview(payload)
        while rest:
            rest = rest[self._socket.send(rest) :]

    def send_document(self, kind: FrameKind, document: dict[str, Any], tag: int = 0) -> None:
        self.send(kind, tag, json.dumps(document).encode("utf-8"))

    def receive(self, until: float | None = None) -> tuple[FrameKind, int, bytearray]:
        """(kind, tag, payload). Raises ChannelError, also where nothing comes within the socket's
        timeout, or the frame is not complete at `until`, a time of the monotonic clock."""
        head = self._read(_HEADER.size + hashlib.sha256().digest_size, until)
        header, mac = bytes(head[: _HEADER.size]), bytes(head[_HEADER.size :])
        kind, tag, length = _HEADER.unpack(header)
        if length > _MAX_FRAME_BYTES:
            raise ChannelError(f"a frame of {length:,} bytes")
        payload = self._read(length, until)
        if not hmac.compare_digest(mac, self._mac("receive", self._received, header, payload)):
            raise ChannelError("a frame with a wrong authentication code")
        self._received += 1
        try:
            return FrameKind(kind), tag, payload
        except ValueError:
            raise ChannelError(f"a frame of an unknown kind, {kind}") from None

    def _read(self, count: int, until: float | None = None) -> bytearray:
        def heard() -> None:
            self.heard = time.monotonic()

        return read_exactly(self._socket, count, heard, until)

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long the other side may be silent; None: for ever. Raises ChannelError where it
        is closed already."""
        try:
            self._socket.settimeout(seconds)
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Heard by a thread that waits in `receive` or `send`, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(
        self, way: str, number: int, header: bytes, payload: bytes | bytearray | memoryview
    ) -> bytes:
        found = hmac.new(
            self._key, self._directions[way] + number.to_bytes(8, "big") + header, hashlib.sha256
        )
        found.update(payload)
        return found.digest()


def document_of(payload: bytes | bytearray) -> dict[str, Any]:
    """Raises ChannelError."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ChannelError("a frame that is not a JSON object")
    return document


def open_channel(
    connection: socket.socket, secret: bytes, *, as_store: bool, within: float = HANDSHAKE_SECONDS
) -> AuthenticatedChannel:
    """Authenticate both sides and return the channel. within: seconds for all of it.

    Raises WrongSecret, or ChannelError.
    """
    handshake = Handshake(MAGIC, secret, is_server=as_store)
    authenticate(connection, handshake, within)
    sends, receives = (b"store", b"rank") if as_store else (b"rank", b"store")
    return AuthenticatedChannel(connection, handshake.key(b"frames"), sends, receives)


def silence_limit_seconds(deadline_seconds: float) -> float:
    """Return how long a member of a running outer step may be silent. The other members wait
    meanwhile."""
    return deadline_seconds / 4
