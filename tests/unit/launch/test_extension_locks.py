"""A lock that a killed build left behind is told from one that a living process holds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shardwright.launch.preflight_checks import (
    STALE_LOCK_AGE_SECONDS,
    extensions_root,
    stale_build_locks,
)


def lock(folder: Path, seconds: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    then = time.time() - seconds
    os.utime(folder / "lock", (then, then))
    return folder / "lock"


def test_only_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    left, held = (
        lock(tmp_path / "py311_cu128" / "cpu_adam", 9e3),
        lock(tmp_path / "py311_cu128" / "utils", 9e3),
    )
    lock(tmp_path / "flat", STALE_LOCK_AGE_SECONDS / 2)
    with held.open():
        assert stale_build_locks(tmp_path) == (left,)
    assert stale_build_locks(tmp_path) == (left, held)
    assert stale_build_locks(tmp_path / "nowhere") == ()


def test_where_torch_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extensions_root() == tmp_path
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert extensions_root() == Path("/c/torch_extensions")
