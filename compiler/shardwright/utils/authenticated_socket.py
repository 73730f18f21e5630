"""TCP connections whose two sides prove to each other that they know one secret.

Each side sends its protocol's name and a nonce. The client then sends a hello and its proof, and
the server, once it takes the client, its own proof. A proof is HMAC-SHA256 under the secret of the
side's name, both nonces and the hello: the secret never crosses the network, and nothing that was
overheard proves anything on another connection. How many connections may be unauthenticated at once
is bounded here, too. What is said afterwards is the protocol's own.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from typing import Generic, TypeVar

NONCE_BYTES = PROOF_BYTES = 32
HELLO_SIZE_BYTES = 2
MAX_HELLO_BYTES = 2**12
HANDSHAKE_SECONDS = 10.0
"""Limits a whole handshake; each side needs milliseconds for it."""


class ChannelError(ConnectionError):
    """The connection ended, or what came over it is not of the protocol."""


class PeerClosedError(ChannelError):
    """The other side closed the connection."""


class WrongSecret(ChannelError, PermissionError):
    """The other side does not know the secret."""


class Handshake:
    """Runs one side of a handshake, without a socket. hello: the client's, on both sides.

    output: the bytes to send next: at first the greeting, for a server at the end its proof, which
    it sends only to a client that it takes.
    """

    def __init__(
        self, protocol: bytes, secret: bytes, *, is_server: bool, hello: bytes = b""
    ) -> None:
        """protocol: its name and version, not longer than a line."""
        self._protocol, self._secret, self.is_server, self.hello = (
            protocol,
            secret,
            is_server,
            hello,
        )
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self.output = protocol + self._nonce
        self.is_complete = False
        self._received = b""
        self._stages = self._run()
        self._stage_bytes = next(self._stages)

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes to read at most before the next call of `feed`."""
        return self._stage_bytes - len(self._received)

    @property
    def is_greeted(self) -> bool:
        """Return whether the other side has said that it speaks this protocol."""
        return bool(self._nonces)

    def feed(self, data: bytes) -> bytes:
        """Take at most `missing_bytes` of the other side's; return what is to be sent for it.

        Raises ChannelError for another protocol, WrongSecret for a proof that is none.
        """
        self._received += data
        if not self.is_greeted and not self._protocol.startswith(
            self._received[: len(self._protocol)]
        ):
            raise ChannelError("the other side speaks another protocol, or another version of it")
        self.output = b""
        if not self.missing_bytes:
            stage, self._received = self._received, b""
            try:
                self._stage_bytes = self._stages.send(stage)
            except StopIteration:
                self._stage_bytes, self.is_complete = 0, True
        return self.output

    def key(self, name: bytes) -> bytes:
        """Return a key of this connection that both sides derive. is_greeted."""
        return hmac.digest(self._secret, name + self._nonces, "sha256")

    def _run(self) -> Generator[int, bytes, None]:
        """Yield the bytes of each stage, and be sent them."""
        greeting = yield len(self._protocol) + NONCE_BYTES
        peer_nonce = greeting[len(self._protocol) :]
        server_first = (self._nonce, peer_nonce) if self.is_server else (peer_nonce, self._nonce)
        self._nonces = b"".join(server_first)
        if self.is_server:
            size = int.from_bytes((yield HELLO_SIZE_BYTES), "big")
            if size > MAX_HELLO_BYTES:
                raise ChannelError(f"a hello of {size:,} bytes")
            self.hello = (yield size) if size else b""
        else:
            size_and_hello = len(self.hello).to_bytes(HELLO_SIZE_BYTES, "big") + self.hello
            self.output = size_and_hello + self._proof(b"client")
        other = b"client" if self.is_server else b"server"
        if not hmac.compare_digest((yield PROOF_BYTES), self._proof(other)):
            raise WrongSecret("the secrets differ")
        if self.is_server:
            self.output = self._proof(b"server")

    def _proof(self, side: bytes) -> bytes:
        return self.key(side + self.hello)


def authenticate(
    connection: socket.socket, handshake: Handshake, timeout_seconds: float = HANDSHAKE_SECONDS
) -> None:
    """Run the handshake on a blocking socket, whose timeout stays what it is.

    Raises WrongSecret, also where a server ends the connection at this side's proof; else
    ChannelError.
    """
    timeout_before, until = connection.gettimeout(), time.monotonic() + timeout_seconds
    try:
        connection.sendall(handshake.output)
        while not handshake.is_complete:
            received = read_exactly(connection, handshake.missing_bytes, until=until)
            connection.sendall(handshake.feed(bytes(received)))
        connection.settimeout(timeout_before)
    except PeerClosedError:
        if handshake.is_greeted and not handshake.is_server:
            raise WrongSecret("the secrets differ") from None
        raise
    except ChannelError:
        raise
    except OSError as error:
        raise ChannelError(str(error)) from None


def read_exactly(
    connection: socket.socket,
    count: int,
    on_bytes: Callable[[], None] = lambda: None,
    until: float | None = None,
) -> bytearray:
    """Return the next `count` bytes. on_bytes: called whenever some came.

    until: when all of them have to be here, by the monotonic clock, however often one comes. Raises
    ChannelError.
    """
    buffer = bytearray(count)
    view, at = memoryview(buffer), 0
    while at < count:
        try:
            if until is not None:
                connection.settimeout(max(until - time.monotonic(), 0.001))
            got = connection.recv_into(view[at:])
        except ConnectionError as error:
            raise PeerClosedError(str(error)) from None
        except OSError as error:  # a timeout is one
            raise ChannelError(str(error) or type(error).__name__) from None
        if got == 0:
            raise PeerClosedError("the connection was closed")
        at += got
        on_bytes()
    return buffer


def keep_alive(connection: socket.socket, timeout_seconds: float) -> None:
    """End the connection once its host or the route to it has been gone for this long.

    What was sent and is not acknowledged counts, and where nothing is sent the kernel asks, at
    least every half minute.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (
        (socket.TCP_NODELAY, 1.0),
        (socket.TCP_KEEPIDLE, min(30.0, timeout_seconds / 3)),
        (socket.TCP_KEEPINTVL, min(10.0, timeout_seconds / 6)),
        (socket.TCP_USER_TIMEOUT, 1000 * timeout_seconds),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds)))


Connection = TypeVar("Connection", bound=Hashable)

RESERVED_DESCRIPTORS = 64
"""Descriptors that are left to the process's files and pipes, and to what its libraries open."""
MIN_CONNECTIONS = 4
"""Unauthenticated connections at once, however low the limit of open files is."""


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open files to what the system allows it. Returns the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def is_out_of_descriptors(error: OSError) -> bool:
    """Return whether accept() failed because the process or the host has no descriptor or buffer
    left."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class UnauthenticatedConnections(Generic[Connection]):
    """The open connections that have proved nothing, oldest first. Safe to use from several
    threads.

    A peer that only finds the port fills no more than its own address's share. The one that gives
    way is the oldest of the address that has most: a rank, which proves itself within milliseconds,
    is never that for long.
    """

    def __init__(self, expected: int, others: int, limit: int) -> None:
        """expected: connections that may come at once from the run itself, all from one address at
        worst. others: how many more may be open. limit: the process's limit of open files;
        `expected` of them are for the run."""
        descriptors_left = limit - expected - RESERVED_DESCRIPTORS
        self.most = max(MIN_CONNECTIONS, min(expected + others, descriptors_left))
        self.max_per_address = min(expected + others // 4, self.most)
        self._open: dict[Connection, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def add(self, connection: Connection, address: str) -> list[Connection]:
        """Returns the connections that have to be closed for this one. They are no longer
        counted."""
        with self._lock:
            self._open[connection] = address
            evicted = []
            if list(self._open.values()).count(address) > self.max_per_address:
                evicted.append(self._pop_oldest(address))
            if len(self._open) > self.most:
                evicted.append(self._pop_oldest(self._largest_address()))
            return evicted

    def remove(self, connection: Connection) -> None:
        """Forgets one that has proved itself, or is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def pop(self) -> Connection | None:
        """Returns the connection to be closed where no descriptor is left; None where none is
        unauthenticated."""
        with self._lock:
            return self._pop_oldest(self._largest_address()) if self._open else None

    def _largest_address(self) -> str:
        addresses = list(self._open.values())
        return max(dict.fromkeys(addresses), key=addresses.count)

    def _pop_oldest(self, address: str) -> Connection:
        oldest = next(connection for connection, of in self._open.items() if of == address)
        del self._open[oldest]
        return oldest


def shutdown_connection(connection: socket.socket) -> None:
    """Ends a connection that another thread waits on: that thread hears of it and closes the
    descriptor."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
