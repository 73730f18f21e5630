"""The hosts that `run --supervise` restarts ranks on; over ssh: whether they answer, and the end of
a stopped rank there. No torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shardwright.plan.hostfile import Host
from shardwright.utils.file_io import write_atomically

CONNECT_SECONDS = 5
ANSWER_SECONDS = 15.0


class HostPool(Protocol):
    """Hosts that attempts run on.

    poll_seconds: between two looks for a host that returns. exit_code_without_hosts: of a run whose
    hosts are too few
    """

    poll_seconds: float
    exit_code_without_hosts: int

    def names(self) -> list[str]:
        """Return the hosts that may answer, now or later, spares last."""
        ...

    def reach(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the hosts that answer, in order, each with its own host name."""
        ...

    def bind(self, hosts: Sequence[str]) -> Path | None:
        """Let the next attempt run on these hosts; return its hostfile, if it takes one."""
        ...

    def end_attempt(self) -> None:
        """End what the last attempt left on hosts that answer, as far as one command can."""
        ...

    def kill_rank(self, host: str, pid: int, folder: Path) -> None:
        """Kill a rank of the compiled folder that answers nothing any more."""
        ...

    def is_preempted(self) -> bool:
        """Return whether all hosts are about to be taken away."""
        ...


class SshHosts:
    """Holds the hosts of a hostfile, which ssh reaches."""

    poll_seconds = 10.0
    exit_code_without_hosts = 3

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.slots = {host.name: host.slots for host in hosts}
        self.hostfile = folder / "run" / "hostfile"

    def names(self) -> list[str]:
        return list(self.slots)

    def reach(self, hosts: Sequence[str]) -> dict[str, str]:
        return reachable_hosts(hosts)

    def bind(self, hosts: Sequence[str]) -> Path:
        lines = (f"{name} slots={self.slots[name]}\n" for name in hosts)
        write_atomically(self.hostfile, "".join(lines))
        return self.hostfile

    def end_attempt(self) -> None:
        """Do nothing: ranks end once their output has no reader."""

    def kill_rank(self, host: str, pid: int, folder: Path) -> None:
        kill_rank(host, pid, folder)

    def is_preempted(self) -> bool:
        return False


def reachable_hosts(hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts that answer, in order, each with its own host name. All are asked at
    once."""
    asked = {host: _ssh(host, "hostname") for host in hosts}
    end, found = time.monotonic() + ANSWER_SECONDS, {}
    for host, process in asked.items():
        try:
            name, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            if process.returncode == 0:
                found[host] = name.strip()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return found


def kill_rank(host: str, pid: int, folder: Path) -> None:
    """Kill a rank that answers nothing any more, where process `pid` of the host still runs in the
    compiled folder."""
    here = shlex.quote(str(folder.resolve()))
    process = _ssh(host, f'[ "$(readlink /proc/{pid}/cwd)" = {here} ] && kill -9 {pid}')
    try:
        process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _ssh(host: str, command: str) -> subprocess.Popen[str]:
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return subprocess.Popen(
        [
            *("ssh", *options, "-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}"),
            *("-oServerAliveInterval=3", "-oServerAliveCountMax=2", "--", host, command),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
