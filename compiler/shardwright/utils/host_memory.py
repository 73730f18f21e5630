"""Memory of a process whose tensors live on the host: a rank on CPUs."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Blocks that are freed stay with the process. glibc hands those beyond 32 MiB back to the
    kernel at once, and each step would fault their pages in again. False where the C library has no
    such switch."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
