"""Commands and ranks of tests that start warm: forked from a process that has imported torch and
DeepSpeed.

A launch of four tiny ranks spends most of its time on imports. `environment()` makes the real
`shardwright`, the real `deepspeed` launcher and the ranks under them start this way; everything
after the imports is what a cold start runs. Tests about processes themselves (signals, kills,
hosts, seconds, what is imported) start cold.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.warm.path.sitecustomize import hub_settings

HERE = Path(__file__).resolve().parent
ADDRESS = "SHARDWRIGHT_WARM"
"""The server's socket; unset: everything starts cold."""
HUB = "SHARDWRIGHT_WARM_HUB"
"""The settings of huggingface_hub, which reads them when it is imported: a child with others starts
cold."""


def environment(*inside: str) -> dict[str, str]:
    """This process's environment, for a child that starts warm and whose children do. Where a test
    has planted a sitecustomize.py, that one stands before ours and everything starts cold. inside:
    words that start a command in other namespaces, where all of them run then."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE / "path")]
    address, hub = _server(inside)
    return {**os.environ, ADDRESS: address, HUB: hub, "PYTHONPATH": os.pathsep.join(path)}


@functools.cache
def _server(inside: tuple[str, ...]) -> tuple[str, str]:
    """Address and settings. One for all tests of this process. Ends with it, and what it started
    does too."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = f"{folder}/socket"
    process = subprocess.Popen(
        [*inside, sys.executable, "-u", HERE / "server.py", address],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
        },  # more start threads, which a fork does not carry over
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "ready\n" in process.stdout, "the warm server did not start"
    atexit.register(process.kill)
    return address, hub_settings()
