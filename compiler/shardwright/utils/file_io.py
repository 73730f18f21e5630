"""Read files of other users so that they can neither block this process nor exhaust it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import cast

import msgspec

from shardwright.utils.json_values import JsonValue

MAX_FILE_BYTES = 16 * 2**20
"""Bounds a file whose reader names no limit of its own: a configuration, a hostfile, a script."""
MAX_JSON_DEPTH = 64
"""Levels. What is written for people or by transformers and DeepSpeed has fewer than ten; Python's
own walks of a value are recursive and end at about a thousand."""


@contextlib.contextmanager
def open_regular_file(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    """Open a file to read. Raises OSError, with words in `strerror`: a folder, a pipe or device, or
    the system's own reason."""
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_regular_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the whole file. Raises OSError as open_regular_file does, and for a file that is too
    large."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size or max_bytes  # 0: of /proc, say
        data = file.read(min(size, max_bytes) + 1)
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


def parse_strict_json(text: str | bytes) -> JsonValue:
    """Parse a file that only this project writes: JSON of RFC 8259, without NaN, lone surrogates
    and integers beyond 64 bits, and at most MAX_JSON_DEPTH levels deep.

    Raises ValueError alone.
    """
    try:
        value = cast(JsonValue, msgspec.json.decode(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[JsonValue] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        if any(isinstance(each, int) and abs(each) >= 2**63 for each in level):
            raise ValueError("it has an integer beyond 64 bits")
        level = _values_below(level)
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")


def is_nested_too_deeply(value: JsonValue, max_depth: int = MAX_JSON_DEPTH) -> bool:
    level: list[JsonValue] = [value]
    for _ in range(max_depth + 1):
        if not any(isinstance(item, dict | list) for item in level):
            return False
        level = _values_below(level)
    return True


def _values_below(level: list[JsonValue]) -> list[JsonValue]:
    return [
        below
        for item in level
        if isinstance(item, dict | list)
        for below in (item.values() if isinstance(item, dict) else item)
    ]


# A file of the user's own, written whole or not at all.


def write_atomically(path: Path, text: str, *, mode: int | None = None, flush: bool = True) -> None:
    """Write UTF-8 so that the old file or the new one is there at any moment.

    A link is followed; into a device or a pipe it is written as it is. mode: None keeps the rights
    of a file that is there. flush: return once the disk has it. Raises OSError, which names `path`.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(text.encode("utf-8"))  # a device or a pipe, which stays what it is
        return
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
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(target), None  # that of a write has no name
        raise


def umask() -> int:
    """Return this process's umask. The system call would change it for every thread meanwhile."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("\nUmask:")[2].split()[0], 8)
