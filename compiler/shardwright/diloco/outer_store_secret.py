"""The secret that the outer store and every rank know: a file of each island's folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from shardwright.diagnostics import refusal

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
        "Start `shardwright outer-store DIR` first: it writes one for every island's folder that "
        "it finds. Copy it to the same place of the folder at the other sites.",
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
    """Writes the file whole or not at all, readable by this user alone. Raises Refusal: SW6322."""
    text, temporary = secret + b"\n", path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and path.read_bytes() == text and path.stat().st_mode & 0o077 == 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise refusal(
            "SW6322",
            (
                f"the outer store's secret cannot be written to {str(path)!r}: "
                f"{error.strerror or error}"
            ),
            (
                "Make room there, or give this user the right to write there, and start "
                "`shardwright outer-store` again."
            ),
        ) from None
