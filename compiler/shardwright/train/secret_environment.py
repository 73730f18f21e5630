"""Pass the values of launch.env_from to ranks: on no command line, in no log, in no readable file.

launch.sh of a pdsh run writes them over ssh into a file in each host's memory, which
SHARDWRIGHT_ENV_FILE names. A rank reads the file first of all. Other launchers pass the environment
on by themselves.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.plain_secrets import PlainSecret

ENV_FILE_VARIABLE = "SHARDWRIGHT_ENV_FILE"
READ_ENV_FILE_VARIABLE = "SHARDWRIGHT_ENV_TAKEN"
"""Holds the same path in a rank that has read the file, which is still to be removed."""

MIN_SECRET_CHARACTERS = 6
"""Is the least number of characters of a value that is redacted; shorter ones are part of many
words."""


def restart_with_secret_environment() -> Refusal | None:
    """Start this process again with the file's values in its environment, where launch.sh named
    one.

    Some (LD_LIBRARY_PATH, PYTHONPATH) are read only when a process begins. The process id stays.
    Returns SW6012 where the file is missing, for the rank to report once it can.
    """
    try:
        if values := _values():
            os.execve(
                sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **values}
            )
    except Refusal as refusal:
        return refusal
    return None


def load_secret_environment() -> None:
    """Set the file's values in a user's script, which does not restart. Raises Refusal: SW6012."""
    os.environ.update(_values())


def _values() -> dict[str, str]:
    """Return the file's values and its path; empty where launch.sh named none, or it was read
    before."""
    path = os.environ.pop(ENV_FILE_VARIABLE, "")
    if not path:
        return {}
    try:
        # No link and no other user's file: everybody can write to the folder.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if not stat.S_ISREG(found.st_mode) or not own:
                raise PermissionError(f"{path} can be accessed by other users")
            entries = file.read().split(b"\0")
    except OSError as error:
        raise refusal(
            "SW6012",
            f"the values of launch.env_from did not reach this host: {error}",
            "launch.sh sends them by ssh when it starts. Try `ssh HOST true` from where it was "
            "started, and check that /dev/shm on this host is not full.",
        ) from None
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {**{name: value for name, _, value in pairs}, READ_ENV_FILE_VARIABLE: path}


def remove_secret_environment_file() -> None:
    """Removes the file, once every rank of this host has read it."""
    if path := os.environ.pop(READ_ENV_FILE_VARIABLE, ""):
        Path(path).unlink(missing_ok=True)


def secret_redactor(
    names: Iterable[str], plain: Iterable[PlainSecret] = ()
) -> Callable[[str], str]:
    """Return a function that replaces these environment variables' values by `[NAME]`.

    plain: the secrets that the recipe itself holds
    """
    values = [(line, name) for name in names for line in os.environ.get(name, "").splitlines()]
    values += [(secret.value, secret.name) for secret in plain]
    # A value that contains another one is replaced first.
    found = sorted(
        ((v, n) for v, n in values if len(v) >= MIN_SECRET_CHARACTERS),
        key=lambda pair: -len(pair[0]),
    )

    def redact(text: str) -> str:
        for value, name in found:
            text = text.replace(value, f"[{name}]")
        return text

    return redact
