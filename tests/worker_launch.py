"""Starts a test's worker script under the real `deepspeed` launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shardwright.utils.child_processes import free_port
from tests import warm

ROOT = Path(__file__).resolve().parents[1]


def launch_worker(
    worker: Path, ranks: int, *, seconds: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script on `ranks` CPU ranks of this host, which start warm; raises TimeoutExpired
    after `seconds`."""
    started = warm.environment()
    path = [str(ROOT), str(ROOT / "compiler"), started["PYTHONPATH"]]
    return subprocess.run(
        [
            *(str(Path(sys.executable).parent / "deepspeed"), "--hostfile", "none"),
            *("--num_gpus", str(ranks), "--master_port", str(free_port()), str(worker)),
        ],
        env={
            **started,
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join(path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=seconds,
    )
