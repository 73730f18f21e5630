"""What a file of measurements says of the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    found = {}
    for name in ("shardwright", "torch", "deepspeed", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
