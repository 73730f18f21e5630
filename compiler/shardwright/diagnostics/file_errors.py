"""Turn what a disk or its permissions refuse into a diagnostic that names the file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics.diagnostic import Refusal, refusal

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_HELP = {
    **dict.fromkeys(
        NO_SPACE, "Make room there, or move the compiled folder to another disk, then try again."
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "Give this user permission there, or copy the folder to a place of your own.",
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN), "Check the disk or the network file system."
    ),
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
        "Move away what is there under that name, then try again.",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (`ulimit -n`)."),
}
"""Errors of the disk, of permissions or of what a user put somewhere; others are bugs."""


@contextlib.contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none: that of a write has none by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def file_error_refusal(error: OSError) -> Refusal | None:
    """Return SW6323 for a file that the system refuses; None for an error of another kind, or of no
    file."""
    if error.errno not in _HELP or not isinstance(error.filename, str | Path):
        return None
    reason = str(error.strerror or error)
    if error.errno in NO_SPACE:
        reason += f" (the file system at {mount_point(Path(error.filename))})"
    message = f"{str(error.filename)!r} cannot be used: {reason}"
    return refusal("SW6323", message, _HELP[error.errno])


def mount_point(path: Path) -> str:
    """Return where the file system of a path begins."""
    here = Path(os.path.abspath(path)).parent
    with contextlib.suppress(OSError):
        here = here.resolve()
        while here != here.parent and here.stat().st_dev == here.parent.stat().st_dev:
            here = here.parent
    return str(here)
