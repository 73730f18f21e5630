"""`run` for a scheduler that starts the ranks later: hands over the job and says what it is
called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from shardwright.diagnostics import Refusal, refusal
from shardwright.launch.launchers.job_scheduler import scheduler_of
from shardwright.plan.plan import Plan
from shardwright.utils.programs import program_path

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
            f"{command[0]} did not answer in {SUBMIT_TIMEOUT_SECONDS:.0f} s", "Is the scheduler up?"
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
