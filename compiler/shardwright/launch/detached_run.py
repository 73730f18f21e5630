"""`run --detach`: the same command in a session of its own, which no terminal and no ssh session
takes down."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from shardwright.launch.launcher_process import run_alive_refusal
from shardwright.launch.run_state import is_alive
from shardwright.monitor.run_files import read_attempt_record
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import load_plan
from shardwright.utils.programs import shardwright_command

POLL_SECONDS = 0.2


def run_detached(folder: Path, hostfile: Path | None, resume: str) -> int:
    """Returns once the run has passed its checks: 0, or the exit code of one that did not."""
    plan, before = load_plan(folder), _attempt(folder)
    if is_alive(folder):
        raise run_alive_refusal(folder)
    log = folder / "run" / "logs" / "run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    hosts = ["--hostfile", str(hostfile)] if hostfile else []
    with log.open("w") as file:
        process = subprocess.Popen(
            shardwright_command("run", str(folder), "--resume", resume, *hosts),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while (code := process.poll()) is None and (_attempt(folder) == before or not is_alive(folder)):
        time.sleep(POLL_SECONDS)
    if code is not None:
        print(log.read_text(errors="replace"), end="", file=sys.stderr if code else sys.stdout)
        return code
    print(_started_text(plan, folder, process.pid, log))
    return 0


def _attempt(folder: Path) -> int | None:
    return read_attempt_record(folder).number


def _started_text(plan: Plan, folder: Path, pid: int, log: Path) -> str:
    place = shlex.quote(str(folder))
    return (
        f"running    {plan.name}, process {pid}, detached\n"
        f"output     {log}\n"
        f"how it is  shardwright status {place}\n"
        f"follow it  shardwright logs {place} -f\n"
        f"end it     shardwright stop {place}"
    )
