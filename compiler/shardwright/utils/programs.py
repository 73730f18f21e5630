"""Programs that this process starts: this installation's own, and a port for them."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def program_path() -> str:
    """PATH with this environment's programs first: the engine's own, whether it is activated or
    not."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def shardwright_command(*arguments: str) -> list[str]:
    """`shardwright` with these arguments, in a process of its own. -P: a file of the current
    directory that has a module's name is never imported."""
    return [sys.executable, "-P", "-m", "shardwright", *arguments]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])
