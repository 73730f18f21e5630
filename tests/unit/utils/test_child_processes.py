"""A child ends with all that it has started, and has its grace first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

from shardwright.utils.child_processes import end_processes

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
