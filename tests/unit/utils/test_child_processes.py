"""A child ends with all that it has started, and has its grace first. Ports are free, and no
outgoing connection gets them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwright.utils import child_processes
from shardwright.utils.child_processes import LISTENING_PORTS, end_processes, free_port

PARENT = """
import signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep, start_new_session=True)
def on_interrupt(*_):
    print("interrupted", flush=True)
    if sys.argv[1] == "obeys":
        child.kill()
        child.wait()
        sys.exit(7)
signal.signal(signal.SIGINT, on_interrupt)
print(child.pid, flush=True)
while True:
    time.sleep(60)
"""


def started(kind: str, *, own_session: bool = True) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The parent, and what it has started in a process group of its own."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def is_gone(process: psutil.Process) -> bool:
    end = time.monotonic() + 10
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_who_obeys_the_signal_ends_by_itself() -> None:
    for own_session in (True, False):
        parent, child = started("obeys", own_session=own_session)
        end_processes([parent], signal.SIGINT, 20)
        assert parent.returncode == 7 and is_gone(child)


def test_who_does_not_is_killed_with_all_that_it_has_started() -> None:
    obeys, first = started("obeys")
    ignores, second = started("ignores")
    began = time.monotonic()
    end_processes([ignores, obeys], signal.SIGINT, 1.0)
    assert 0.9 < time.monotonic() - began < 10
    assert (obeys.returncode, ignores.returncode) == (7, -signal.SIGKILL)
    assert is_gone(first) and is_gone(second)


def test_without_a_signal_it_is_killed_at_once() -> None:
    parent, child = started("ignores")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    end_processes([ended, parent])
    assert parent.returncode == -signal.SIGKILL and is_gone(child) and ended.returncode == 0


def test_free_ports_are_apart_from_those_of_connections() -> None:
    found = {free_port() for _ in range(200)}
    assert found <= set(LISTENING_PORTS) and len(found) > 190
    kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not kernel.exists() or int(kernel.read_text().split()[0]) != 32768:
        pytest.skip("this machine's ports of connections are not Linux's defaults")
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(200)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        assert not {each.getsockname()[1] for each in sockets} & set(LISTENING_PORTS)


def test_a_port_that_is_taken_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", free_port()))
        ports = [one.getsockname()[1], other.getsockname()[1]]
        monkeypatch.setattr(child_processes, "LISTENING_PORTS", ports)
        for _ in range(20):
            assert free_port() not in ports
        other.close()
        assert {free_port() for _ in range(20)} == {ports[1]}
