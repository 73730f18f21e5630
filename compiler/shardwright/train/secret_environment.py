"""Values of launch.env_from: on no command line, in no log, in no file that another user can read.

launch.sh of a pdsh run writes them over ssh into a file in each host's memory, named by
SHARDWRIGHT_ENV_FILE; a rank takes them from there before it does anything else. Other launchers
hand the environment on by themselves.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from shardwright.diagnostics import Refusal, refusal

ENV_FILE_VARIABLE = "SHARDWRIGHT_ENV_FILE"
READ_ENV_FILE_VARIABLE = "SHARDWRIGHT_ENV_TAKEN"
"""The same path, in a rank that has read it: what is left to remove."""

MIN_SECRET_CHARACTERS = 6
"""Characters of a value that is blotted out. A shorter one (`1`, `true`) is no secret and is part
of too many words."""


def restart_with_secret_environment() -> Refusal | None:
    """Starts this process again with the values of the file in its environment, where launch.sh
    named one: some (LD_LIBRARY_PATH, PYTHONPATH) are read only when a process begins. Same process
    id. Returns SW6012 where there is no such file, for the rank to tell once it is able to."""
    try:
        if values := _values():
            os.execve(
                sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **values}
            )
    except Refusal as refusal:
        return refusal
    return None


def load_secret_environment() -> None:
    """For a script of one's own, which is not started again: the values are there from here on.
    Raises Refusal: SW6012."""
    os.environ.update(_values())


def _values() -> dict[str, str]:
    """What the file says, and where it is: empty where launch.sh named none, or it was read
    before."""
    path = os.environ.pop(ENV_FILE_VARIABLE, "")
    try:
        return {**_read(Path(path)), READ_ENV_FILE_VARIABLE: path} if path else {}
    except OSError as error:
        raise refusal(
            "SW6012",
            f"the values of launch.env_from did not reach this host: {error}",
            "launch.sh sends them by ssh when it starts. Try `ssh HOST true` from where it was "
            "started, and see that /dev/shm is not full there.",
        ) from None


def _read(path: Path) -> dict[str, str]:
    """Raises OSError."""
    # Not through a link, and from nobody else: the folder is everybody's.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        entries = file.read().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def remove_secret_environment_file() -> None:
    """Removes the file, once every rank of this host has read it."""
    if path := os.environ.pop(READ_ENV_FILE_VARIABLE, ""):
        Path(path).unlink(missing_ok=True)


def secret_redactor(names: Iterable[str]) -> Callable[[str], str]:
    """A function that puts `[NAME]` where a text holds the value of one of these environment
    variables."""
    values = [(line, name) for name in names for line in os.environ.get(name, "").splitlines()]
    # A value that holds another one goes first.
    found = sorted(
        ((v, n) for v, n in values if len(v) >= MIN_SECRET_CHARACTERS),
        key=lambda pair: -len(pair[0]),
    )

    def redact(text: str) -> str:
        for value, name in found:
            text = text.replace(value, f"[{name}]")
        return text

    return redact
