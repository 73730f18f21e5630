"""A command that starts warm takes its asker's place: words, environment, folder, files, signals
and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm

pytest.importorskip("deepspeed")

_SAY = """
import json, os, sys, threading
print(json.dumps([sys.argv, os.getcwd(), os.environ["OWN"], sys.stdin.read(), "torch" in sys.modules, sys.path[0]]))
print("aside", file=sys.stderr)
os.write(int(sys.argv[1]), b"through a file")
sys.exit(7)
"""  # noqa: E501


def started(script: Path, *words: str, **keywords: Any) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-u", str(script), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**warm.environment(), "OWN": "this one's"},
        **keywords,
    )
    return process


def test_it_is_as_if_the_asker_had_run_it(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(_SAY)
    ours, theirs = os.pipe()
    process = started(script, str(theirs), "b", cwd=tmp_path, pass_fds=[theirs])
    os.close(theirs)
    said, aside = process.communicate("asked", timeout=60)
    words, folder, own, read, is_warm, first_path = json.loads(said)
    assert (words, folder, own, read) == (
        [str(script), str(theirs), "b"],
        str(tmp_path),
        "this one's",
        "asked",
    )
    assert is_warm and first_path == str(tmp_path)
    assert aside == "aside\n"
    with open(ours) as file:
        assert file.read() == "through a file"
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_signal_that_its_asker_gets(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    process = started(script)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_death_of_its_own_is_its_askers_too(tmp_path: Path) -> None:
    script = tmp_path / "die.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    process = started(script)
    assert process.wait(timeout=30) == -signal.SIGKILL
