"""Locks of torch's extension builds that nobody holds any more.

torch.utils.cpp_extension takes a build by creating `lock` in its folder, and keeps it open until it
is done (torch/utils/file_baton.py). A process that was killed meanwhile leaves the file behind, and
every later build of that extension on the host waits for it without end.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from shardwright.plan.plan import Plan

STALE_LOCK_AGE_SECONDS = 600.0
"""A younger lock may be of a host that shares the folder."""


def compiles_cpu_adam(plan: Plan) -> bool:
    """Whether DeepSpeed compiles CPUAdam when a run starts (ds_config.json's torch_adam)."""
    return plan.strategy.offload != "none" and not plan.is_cpu


def extensions_root() -> Path:
    """Where torch builds, without importing it."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(cache) / "torch_extensions"


def stale_build_locks(root: Path | None = None) -> tuple[Path, ...]:
    """Lock files that no process of this host has open, and that were made some time ago."""
    root = extensions_root() if root is None else root
    now, locks = time.time(), []
    for path in sorted((*root.glob("*/lock"), *root.glob("*/*/lock"))):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > STALE_LOCK_AGE_SECONDS:
                locks.append(path)
    held = _open_files() if locks else set()
    return tuple(path for path in locks if str(path.resolve()) not in held)


def _open_files() -> set[str]:
    """Of the processes that this user may look into."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(file.path for file in process.open_files())
    return found
