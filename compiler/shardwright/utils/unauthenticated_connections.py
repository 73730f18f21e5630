"""Connections whose other side has not proved yet that it belongs to the run: how many may be open,
and which of them gives way."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

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
    """Whether accept() failed because the process or the host has no descriptor or buffer left."""
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
