"""The run's token: what a rank proves to know before rank 0 listens to it (channel.py).

Where launch.sh starts every node itself over a network (pdsh, Open MPI, Slurm) it makes one and
hands it to the ranks in their environment. Elsewhere rank 0 makes one and leaves it in run/, in a
file that this user alone can read: on one host, or where the nodes share the folder (no_ssh,
Kubernetes). Nodes that share no folder and start by themselves are given one by hand: the same
SHARDWRIGHT_TOKEN on each. It is never handed out over the network.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path

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
