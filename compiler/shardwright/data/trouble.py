"""Data that cannot be used: one way to say it, and what a disk can do while it is written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal


def refusal(code: str, message: str, help: str) -> Refusal:
    return Refusal(Diagnostic(code=code, message=message, help=help))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the disk says into a diagnostic: SW6114 full, SW6115 not writable."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise refusal(
                "SW6114",
                f"the disk that holds {str(folder)!r} is full; nothing half-written is left",
                "Free space, or make run/data in the compiled folder a link to a larger disk, and prepare again.",
            ) from None
        raise refusal(
            "SW6115",
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror or error}",
            "Give the compiled folder write permission (its run/data holds the tokens), or move it.",
        ) from None
