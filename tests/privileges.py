"""What root may do that others may not, and the other way round: the same tests run as either."""

from __future__ import annotations

import ctypes
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_PASSES_OVER_PERMISSIONS = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (linux/capability.h)."""
_CAPABILITY_VERSION_3, _DROP_FROM_BOUNDING_SET = 0x20080522, 24
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # sched.h
_READ_ONLY, _REMOUNT, _PRIVATE = 1, 32, (1 << 18) | (1 << 14)  # sys/mount.h; private with all below
_NO_MOUNTS = "no mounts of its own"


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """A folder's mode holds for this thread, root's too. Processes that it starts: `binds`."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    before, during = (
        (ctypes.c_uint32 * 6)(),
        (ctypes.c_uint32 * 6)(),
    )  # effective, permitted, inheritable; twice
    for sets in (before, during):
        assert _LIBC.capget(header, sets) == 0
    during[0] &= ~sum(1 << capability for capability in _PASSES_OVER_PERMISSIONS)
    assert _LIBC.capset(header, during) == 0
    try:
        yield
    finally:
        assert _LIBC.capset(header, before) == 0


def binds() -> None:
    """Popen's preexec_fn: a folder's mode holds for the program that is started, root's too."""
    if os.geteuid() == 0:
        for capability in _PASSES_OVER_PERMISSIONS:
            if _LIBC.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")


def with_disk(folder: Path, size: str, test: Callable[[Callable[..., None]], None]) -> None:
    """Runs `test` in a process of its own that sees an empty file system of this size at `folder`.
    It is called with a function that gives it another size, or read_only. Needs no root where the
    kernel gives anybody a user namespace."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # pytest-xdist has threads; the child needs none of them
        child = os.fork()
    if child == 0:
        os.close(read)
        _in_child(folder, size, test, write)
    os.close(write)
    with os.fdopen(read) as told:
        failure = told.read()
    os.waitpid(child, 0)
    if failure.startswith(_NO_MOUNTS):
        pytest.skip(failure)
    assert not failure, failure


def _in_child(
    folder: Path, size: str, test: Callable[[Callable[..., None]], None], write: int
) -> None:
    def remount(size: str = size, *, read_only: bool = False) -> None:
        _mount(folder, None, _REMOUNT | (_READ_ONLY if read_only else 0), f"size={size}")

    failure = ""
    try:
        failure = _own_mounts()
        if not failure:
            _mount(folder, b"tmpfs", 0, f"size={size}")
            test(remount)
    except BaseException:
        failure = traceback.format_exc()
    os.write(write, failure.encode())
    os._exit(0)


def _own_mounts() -> str:
    """ "" where it worked."""
    user, group = os.geteuid(), os.getegid()
    if _LIBC.unshare(_NEW_MOUNTS | (0 if user == 0 else _NEW_USER)):
        return f"{_NO_MOUNTS} for this user: {os.strerror(ctypes.get_errno())}"
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(Path("/"), None, _PRIVATE, "")  # what is mounted here is seen by nobody else
    return ""


def _mount(target: Path, kind: bytes | None, flags: int, options: str) -> None:
    if _LIBC.mount(kind or b"none", bytes(target), kind, ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), "mount", str(target))
