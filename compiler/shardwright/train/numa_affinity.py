"""Bind a rank to the cores beside its GPU, where SHARDWRIGHT_BIND_NUMA is set. No torch here."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

SWITCH = "SHARDWRIGHT_BIND_NUMA"
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4}([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])")


def bind_to_numa_node(local_rank: int, system: Path = Path("/sys")) -> frozenset[int] | None:
    """Bind every thread of this process to the cores of the GPU's NUMA node; memory follows, as it
    comes from the node of the core that touches it first.

    Prints what it did. Returns the cores; None without the switch, or where the node is unknown.

    system: the folder of sysfs
    """
    if os.environ.get(SWITCH, "") in ("", "0"):
        return None
    node = _numa_node(local_rank, system)
    path = system / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    cores = frozenset[int]()
    with contextlib.suppress(OSError):
        cores = frozenset(_cores(path.read_text())) & os.sched_getaffinity(0)
    if not cores:
        print(f"{SWITCH}: the NUMA node of GPU {local_rank} is unknown; no core is bound")
        return None
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    print(f"{SWITCH}: GPU {local_rank} is on NUMA node {node}; {len(cores)} cores are bound")
    return cores


def _numa_node(local_rank: int, system: Path) -> int | None:
    """Return the NUMA node of a visible GPU, None where the system does not say."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    device = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    query = ["nvidia-smi", f"--id={device}", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        bus = _BUS_ID.fullmatch(told.strip())
        if bus is None:
            return None
        path = system / "bus" / "pci" / "devices" / bus[1].lower() / "numa_node"
        node = int(path.read_text())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return node if node >= 0 else None


def _cores(text: str) -> list[int]:
    """Read a list of cores such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]
