"""Define the messages between the ranks and rank 0, and their encoding.

Over TCP: the handshake of utils/authenticated_socket.py under the run's token, with the rank's
hello in it, then one message a line. A line is a JSON object in UTF-8 whose `kind` is one of
_KINDS, with exactly that class's fields.

    rank -> rank 0   hello, in the handshake; then step, stack, failed, bye
    rank 0 -> rank   dump, end

A connection that has not proved to be a rank within HELLO_TIMEOUT_SECONDS is dropped. Until then it
fills a small buffer, and few such connections are open at once (monitor_server.py). The lines are
neither signed nor encrypted: the training network has to be trusted, as NCCL, gloo and torch's
rendezvous store are open to all of it. The token keeps out whoever merely finds the port.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.monitor.rank_events import RankStack
from shardwright.utils.authenticated_socket import (
    HANDSHAKE_SECONDS,
    Handshake,
    authenticate,
    keep_alive,
)
from shardwright.utils.file_io import parse_json
from shardwright.utils.json_values import read_record

# The run's token: what a rank proves to know before rank 0 listens to it.
#
# Where launch.sh starts every node itself over a network (pdsh, Open MPI, Slurm) it makes one and
# hands it to the ranks in their environment. Elsewhere rank 0 makes one and leaves it in run/, in a
# file that this user alone can read: on one host, or where the nodes share the folder (no_ssh,
# Kubernetes). Nodes that share no folder and start by themselves are given one by hand: the same
# SHARDWRIGHT_TOKEN on each. It is never handed out over the network.


TOKEN_VARIABLE = "SHARDWRIGHT_TOKEN"
TOKEN_IN_ENVIRONMENT = "environment"
SHARED_FILE_TIMEOUT_SECONDS = 30.0
"""Limits the wait until a file that rank 0 has written appears on all nodes of a shared file
system."""
_PREFIX = ".token-"


def make_token(folder: Path) -> tuple[str, str]:
    """Rank 0's: (the token, where the others find it: TOKEN_IN_ENVIRONMENT, or the name of a file
    in run/)."""
    if token_of_environment := os.environ.pop(TOKEN_VARIABLE, ""):
        return token_of_environment, TOKEN_IN_ENVIRONMENT
    run = folder / "run"
    delete_token(folder)
    token = secrets.token_hex(32)
    # A name of its own for each token: a file system that caches what it looked up has not seen it
    # yet.
    name = _PREFIX + _fingerprint(token)
    with os.fdopen(os.open(run / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token, name


def find_token(folder: Path, where: str) -> str | None:
    """Another rank's. where: what rank 0 said, over a network that anybody may write to. None: it
    has none."""
    token_of_environment = os.environ.pop(TOKEN_VARIABLE, "")
    if where == TOKEN_IN_ENVIRONMENT:
        return token_of_environment or None
    if not where.startswith(_PREFIX) or "/" in where:
        return None
    end = time.monotonic() + SHARED_FILE_TIMEOUT_SECONDS
    while True:
        try:
            token = (folder / "run" / where).read_text(encoding="ascii")
        except (OSError, ValueError):
            token = ""
        if token and where == _PREFIX + _fingerprint(token):
            return token
        if time.monotonic() > end:
            return None
        time.sleep(0.2)


def delete_token(folder: Path) -> None:
    """Once every rank is there, and what an earlier attempt left."""
    for path in (folder / "run").glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


def _fingerprint(token: str) -> str:
    return hashlib.sha256(f"shardwright {token}".encode()).hexdigest()[:32]


PROTOCOL = b"shardwright-monitor-2\n"
MAX_LINE_BYTES = 2**18
HELLO_TIMEOUT_SECONDS = HANDSHAKE_SECONDS
WELCOME_TIMEOUT_SECONDS = 30.0
LOST_HOST_SECONDS = 17.0
"""After which a host that lost power or network is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """step: the last one that is finished."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReport:
    """The answer to dump."""

    stack: RankStack


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The rank's own error; it ends itself."""

    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """Training is over for the rank: its line may break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Asks every rank to write its threads' stacks and to report where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Asks every rank to exit."""

    cause: str


Message = Hello | StepDone | StackReport | Failed | Bye | Dump | End
_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "step": StepDone,
    "stack": StackReport,
    "failed": Failed,
    "bye": Bye,
    "dump": Dump,
    "end": End,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """The line, newline included. A lone surrogate (of a file's name, say) becomes a question
    mark."""
    document = {"kind": _NAMES[type(message)], **asdict(message)}
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def decode(line: bytes) -> Message | None:
    """Return the message of a line, or None where it is not one."""
    try:
        document: Any = parse_json(line.decode("utf-8"))
        return read_record(_KINDS[document.pop("kind")], document)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class LineReader:
    """Whole lines out of what arrives on a connection, none of them longer than `most_bytes`."""

    def __init__(self, connection: socket.socket, most_bytes: int = MAX_LINE_BYTES) -> None:
        self.connection, self.most_bytes = connection, most_bytes
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Return the lines of one recv; None once the other side has closed, or where a line is too
        long."""
        try:
            chunk = self.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        too_long = any(len(line) > self.most_bytes for line in (*whole, self._rest))
        return None if not chunk or too_long else whole


def connect_to_server(
    address: str, port: int, token: str, rank: int, host: str, pid: int
) -> socket.socket:
    """Return a rank's connection to rank 0, once both have proved that they have the token.

    Raises OSError: WrongSecret where rank 0 has another token or does not take the rank.
    """
    hello = encode(Hello(rank=rank, host=host, pid=pid))
    connection = socket.create_connection((address, port), timeout=WELCOME_TIMEOUT_SECONDS)
    try:
        handshake = Handshake(PROTOCOL, token_bytes(token), is_server=False, hello=hello)
        authenticate(connection, handshake, WELCOME_TIMEOUT_SECONDS)
        connection.settimeout(None)
        keep_alive(connection, LOST_HOST_SECONDS)
    except BaseException:
        connection.close()
        raise
    return connection


def token_bytes(token: str) -> bytes:
    """Return the token as a handshake's secret. A lone surrogate becomes a question mark."""
    return token.encode("utf-8", "replace")
