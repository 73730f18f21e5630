"""Start and end the programs that this process needs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

LISTENING_PORTS = range(20_000, 29_500)
"""Below those that a kernel gives to outgoing connections (Linux from 32768, macOS from 49152): one
of these could take the port in the seconds before a rank 0 has imported torch and listens. Also
below the ports of Kubernetes services (30000) and the default of torchrun and DeepSpeed (29500)."""


def end_processes(
    processes: Sequence[subprocess.Popen[Any]],
    number: signal.Signals = signal.SIGKILL,
    grace_seconds: float = 0.0,
) -> None:
    """Send a signal to each child that runs, and kill what still runs after `grace_seconds`.

    A child that leads a process group is signalled with the group. An interrupt meanwhile kills at
    once. Every child is reaped, and what is left in its pipes is read.
    """
    running = [process for process in processes if process.poll() is None]
    try:
        if number != signal.SIGKILL:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    leads_group = os.getpgid(process.pid) == process.pid
                    (os.killpg if leads_group else os.kill)(process.pid, number)
            until = time.monotonic() + grace_seconds
            for process in list(running):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=max(0.0, until - time.monotonic()))
                    running.remove(process)
    finally:
        for process in running:
            kill_tree(process)
            process.communicate()


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a child and all that it has started, whatever process groups these are in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(process.pid)
        for each in (child, *child.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def program_path() -> str:
    """Return PATH with this environment's programs first, whether it is activated or not."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def shardwright_command(*arguments: str) -> list[str]:
    """Return the command line of `shardwright` with these arguments. With -P no file of the current
    directory is imported as a module."""
    return [sys.executable, "-P", "-m", "shardwright", *arguments]


def free_port() -> int:
    """Return a TCP port that is free at this moment, of LISTENING_PORTS where one of these is.

    The choice is random and ignores seeds: processes that ask at the same time hardly agree.
    """
    for port in (*random.SystemRandom().choices(LISTENING_PORTS, k=100), 0):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return int(s.getsockname()[1])
    raise OSError("no TCP port is free")


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that child processes and folders are cleaned up."""

    def on_term(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, on_term)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
