"""`doctor` where a scheduler chooses the hosts: what would it say of the job? Nothing is submitted.
No torch here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from shardwright.diagnostics import Diagnostic, Refusal, refusal
from shardwright.diagnostics.host_check import HostCheck, red
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.plan.plan import Plan
from shardwright.utils.child_processes import program_path

COMMAND_TIMEOUT_SECONDS = 15.0
"""Limits one command. A controller that is up answers within a few seconds."""
_LOG = re.compile(r"^(?:(?:sbatch|srun|sinfo|scontrol): )?(?:(?:error|fatal): )?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerReply:
    """code: None where the command is not there or did not come back."""

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        """The end of what it complained of, in one line."""
        return " ".join(_LOG.sub("", self.err or self.out).split())[-300:]


def run_scheduler_command(*command: str, cwd: Path | None = None) -> SchedulerReply:
    env = {**os.environ, "PATH": program_path()}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return SchedulerReply(
            code=None, out="", err=f"no answer in {COMMAND_TIMEOUT_SECONDS:.0f} s"
        )
    except OSError as error:
        return SchedulerReply(code=None, out="", err=error.strerror or str(error))
    return SchedulerReply(code=done.returncode, out=done.stdout, err=done.stderr)


def missing_programs(programs: tuple[str, ...], launcher: str) -> tuple[Diagnostic, ...]:
    return tuple(
        red(
            "SW5313",
            f"this machine has no `{program}` command",
            (
                "Run doctor where jobs are submitted, or compile with another launcher than "
                f"{launcher}."
            ),
        )
        for program in programs
        if shutil.which(program, path=program_path()) is None
    )


class Scheduler(Protocol):
    """The module that a launcher's row names: how it takes a job, and what it would say of one."""

    def submit(self, plan: Plan, folder: Path, resume: str) -> None:
        """Prints the job's name and how to follow it. Raises Refusal where it takes none."""
        ...

    def checks(self, plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
        """Outside of an allocation."""
        ...

    def allocated_hosts(self) -> list[str]:
        """The nodes of the allocation that this process is in, in the scheduler's order."""
        ...


def scheduler_of(plan: Plan) -> Scheduler:
    path = LAUNCHERS[plan.launch.launcher].scheduler
    assert path is not None, "asked for before"
    return cast(Scheduler, import_module(path))


# `run` for a scheduler that starts the ranks later: hands over the job and says what it is
# called.


SUBMIT_TIMEOUT_SECONDS = 120.0


def submit(plan: Plan, folder: Path, resume: str) -> int:
    """Prints the job's name and how to follow it. Returns 0. Raises Refusal where the scheduler
    takes no job."""
    scheduler_of(plan).submit(plan, folder, resume)
    return 0


def submit_job(command: list[str], folder: Path) -> str:
    """Standard output."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": program_path()},
            capture_output=True,
            text=True,
            timeout=SUBMIT_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise submission_refusal(
            f"{command[0]} did not answer in {SUBMIT_TIMEOUT_SECONDS:.0f} s",
            "Check that the scheduler is running.",
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:] or f"exit code {done.returncode}"
        raise submission_refusal(
            f"the job was not submitted: {said}",
            "Change the recipe's `launch` section and compile again.",
        )
    return done.stdout


def submission_refusal(message: str, help: str) -> Refusal:
    return refusal("SW5208", message, help)
