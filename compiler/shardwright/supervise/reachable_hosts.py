"""Ask hosts over ssh whether they answer, and end a stopped rank there. No torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

CONNECT_SECONDS = 5
ANSWER_SECONDS = 15.0


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
