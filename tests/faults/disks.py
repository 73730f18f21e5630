"""A small disk of one's own: a tmpfs in namespaces of a process, for which nobody has to be
root."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_USER, _NEW_MOUNTS, _REMOUNT = 0x10000000, 0x00020000, 32
_libc = ctypes.CDLL(None, use_errno=True)


def small_disk(at: Path, size_bytes: int) -> None:
    """Mounted over `at`, in this process alone, which has one thread. Raises OSError where the
    kernel forbids it."""
    user, group = os.getuid(), os.getgid()
    _checked(_libc.unshare(_NEW_USER | _NEW_MOUNTS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    at.mkdir(parents=True, exist_ok=True)
    _mount(at, size_bytes, 0)


def enlarge(at: Path, size_bytes: int) -> None:
    _mount(at, size_bytes, _REMOUNT)


def _mount(at: Path, size_bytes: int, flags: int) -> None:
    options = f"size={size_bytes}".encode()
    _checked(_libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", flags, options))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
