"""What the ranks and rank 0 say to each other, how it stands on the wire, and how each side proves
that it belongs.

TCP, one message a line: a JSON object in UTF-8 whose `kind` is one of _KINDS, with exactly that
class's fields.

    rank 0 -> peer   challenge  at once, with a nonce peer -> rank 0   hello      within
    HELLO_TIMEOUT_SECONDS, in MAX_HELLO_BYTES: who it is, a nonce of its own, its proof rank 0 ->
    peer welcome    rank 0's proof; from here on the peer is that rank rank -> rank 0   step, stack,
    failed, bye rank 0 -> rank   dump, end

A proof is HMAC-SHA256 under the run's token (token.py) of both nonces and of all that the hello
says, another one on each side: the token itself never crosses the network, and neither side takes a
stranger for the other. Whoever says anything else before its welcome is dropped, so strangers reach
nothing but a small buffer, for a moment, and few of them at once (hub.py). Later lines are neither
signed nor encrypted: the training network has to be trusted, as NCCL, gloo and torch's rendezvous
store are open to all of it. What is kept out is whoever merely finds the port.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.monitor.rank_events import RankStack
from shardwright.utils.file_io import parse_json
from shardwright.utils.json_records import read_record

# The run's token: what a rank proves to know before rank 0 listens to it (channel.py).
#
# Where launch.sh starts every node itself over a network (pdsh, Open MPI, Slurm) it makes one and
# hands it to the ranks in their environment. Elsewhere rank 0 makes one and leaves it in run/, in a
# file that this user alone can read: on one host, or where the nodes share the folder (no_ssh,
# Kubernetes). Nodes that share no folder and start by themselves are given one by hand: the same
# SHARDWRIGHT_TOKEN on each. It is never handed out over the network.


TOKEN_VARIABLE = "SHARDWRIGHT_TOKEN"
TOKEN_IN_ENVIRONMENT = "environment"
SHARED_FILE_TIMEOUT_SECONDS = 30.0
"""For a file that rank 0 has written to be seen by all nodes of a shared file system."""
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


MAX_LINE_BYTES = 2**18
MAX_HELLO_BYTES = 2**12
HELLO_TIMEOUT_SECONDS = 10.0
WELCOME_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    rank: int
    host: str
    pid: int
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    proof: str


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
    """Every rank is to write its threads' stacks and to say where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Every rank is to end itself."""

    cause: str


Message = Challenge | Hello | Welcome | StepDone | StackReport | Failed | Bye | Dump | End
_KINDS: dict[str, type[Message]] = {
    "challenge": Challenge,
    "hello": Hello,
    "welcome": Welcome,
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
    """None for anything but a message."""
    try:
        document: Any = parse_json(line.decode("utf-8"))
        return read_record(_KINDS[document.pop("kind")], document)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def make_hello(token: str, challenge: Challenge, rank: int, host: str, pid: int) -> Hello:
    nonce = new_nonce()
    return Hello(
        rank=rank,
        host=host,
        pid=pid,
        nonce=nonce,
        proof=_proof(token, challenge, nonce, rank, host, pid),
    )


def proves(token: str, challenge: Challenge, hello: Hello) -> bool:
    wanted = _proof(token, challenge, hello.nonce, hello.rank, hello.host, hello.pid)
    return hmac.compare_digest(wanted.encode(), hello.proof.encode("utf-8", "replace"))


def make_welcome(token: str, challenge: Challenge, hello: Hello) -> Welcome:
    return Welcome(proof=_proof(token, challenge, hello.nonce, "welcome", hello.proof))


def new_nonce() -> str:
    return secrets.token_hex(16)


def _proof(token: str, challenge: Challenge, *said: object) -> str:
    text = json.dumps([challenge.nonce, *said]).encode("utf-8")
    return hmac.new(token.encode("utf-8", "replace"), text, hashlib.sha256).hexdigest()


class LineReader:
    """Whole lines out of what arrives on a connection, none of them longer than `most_bytes`."""

    def __init__(self, connection: socket.socket, most_bytes: int) -> None:
        self.connection, self.most_bytes = connection, most_bytes
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """What one recv brings; None once the other side is gone, or where a line is too long."""
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
    """A rank's line to rank 0, once both have proved that they have the token. Raises OSError:
    PermissionError where one of them has not."""
    line = socket.create_connection((address, port), timeout=WELCOME_TIMEOUT_SECONDS)
    until = time.monotonic() + WELCOME_TIMEOUT_SECONDS
    with contextlib.ExitStack() as stack:
        stack.callback(line.close)
        challenge = _next(line, until)
        if not isinstance(challenge, Challenge):
            raise ConnectionError(f"what listens on {address}:{port} is not a rank 0")
        hello = make_hello(token, challenge, rank, host, pid)
        line.sendall(encode(hello))
        if _next(line, until) != make_welcome(token, challenge, hello):
            raise PermissionError(f"rank 0 at {address}:{port} has another token")
        stack.pop_all()
    line.settimeout(None)
    return line


def _next(line: socket.socket, until: float) -> Message | None:
    """One message, byte by byte: what comes behind it stays for Lines. None where it is none, or
    the peer has gone. Raises TimeoutError where it is not complete at `until`, a time of the
    monotonic clock."""
    text = b""
    while not text.endswith(b"\n"):
        line.settimeout(max(until - time.monotonic(), 0.001))
        byte = line.recv(1)
        if not byte or len(text) > MAX_HELLO_BYTES:
            return None
        text += byte
    return decode(text)
