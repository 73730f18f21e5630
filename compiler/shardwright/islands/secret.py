"""The secret that the outer store and every rank know: a file of each island's folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shardwright.diagnostics import refusal

SECRET = "run/outer.secret"
_SHORTEST = 16


def read_secret(folder: Path) -> bytes:
    """folder: an island's. Raises Refusal: SW6313."""
    path = folder / SECRET
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        why = f"{str(path)!r} cannot be read: {error.strerror}"
    else:
        if len(secret) >= _SHORTEST:
            return secret
        why = f"{str(path)!r} has {len(secret)} characters, fewer than {_SHORTEST}"
    raise refusal(
        "SW6313",
        f"no secret for the outer store: {why}",
        "Start `shardwright outer-store DIR` first: it writes one for every island's folder that it finds. Copy it to "
        "the same place of the folder at the other sites.",
    )


def share_secret(folder: Path, islands: list[Path]) -> bytes:
    """The compiled folder's, made where it has none, and put into each island's folder that is here."""
    path = folder / SECRET
    if not path.exists():
        _write(path, secrets.token_hex(32).encode("ascii"))
    secret = read_secret(folder)
    for island in islands:
        if island.is_dir():
            _write(island / SECRET, secret)
    return secret


def _write(path: Path, secret: bytes) -> None:
    """Readable by this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret + b"\n")
