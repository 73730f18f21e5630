"""A file of the user's own, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """UTF-8. The old file or the new one is there at any moment. A link is followed; the file's
    rights stay."""
    target = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(
            temporary, stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~umask()
        )
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def umask() -> int:
    """The process's, which can only be read by setting it."""
    before = os.umask(0)
    os.umask(before)
    return before
