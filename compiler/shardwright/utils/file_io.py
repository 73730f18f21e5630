"""Read files of other users so that they can neither block this process nor exhaust it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import cast

from shardwright.utils.json_values import JsonValue

MAX_FILE_BYTES = 16 * 2**20
"""Bounds a file whose reader names no limit of its own: a configuration, a hostfile, a script."""
MAX_JSON_DEPTH = 64
"""Levels. What is written for people or by transformers and DeepSpeed has fewer than ten; Python's
own walks of a value are recursive and end at about a thousand."""


def read_regular_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The whole file. Raises OSError, with words in `strerror`: a folder, a pipe or device, too
    large, or the system's own reason."""
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > max_bytes:
        most = f"{max_bytes // 2**20} MiB" if max_bytes >= 2**20 else f"{max_bytes // 2**10} KiB"
        raise OSError(errno.EFBIG, f"it is larger than {most}", str(path))
    return data


def read_regular_text_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """Raises OSError as read_regular_file does, and UnicodeDecodeError (a ValueError) for what is
    not UTF-8."""
    return read_regular_file(path, max_bytes).decode("utf-8")


def parse_json(text: str | bytes) -> JsonValue:
    """Raises ValueError alone: for text that is no JSON, and for what is nested deeper than
    MAX_JSON_DEPTH."""
    try:
        value = cast(JsonValue, json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_nested_too_deeply(value):
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    return value


def is_nested_too_deeply(value: JsonValue, max_depth: int = MAX_JSON_DEPTH) -> bool:
    level: list[JsonValue] = [value]
    for _ in range(max_depth + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [
            below
            for item in containers
            for below in (item.values() if isinstance(item, dict) else item)
        ]
    return True


# A file of the user's own, written whole or not at all.


def write_atomically(path: Path, text: str, *, mode: int | None = None, flush: bool = True) -> None:
    """Write UTF-8 so that the old file or the new one is there at any moment.

    A link is followed. mode: None keeps the rights of a file that is there. flush: return once the
    disk has it. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            if flush:
                file.flush()
                os.fsync(file.fileno())
        if mode is None:
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~umask()
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def umask() -> int:
    """Return this process's umask. The system call would change it for every thread meanwhile."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("\nUmask:")[2].split()[0], 8)
