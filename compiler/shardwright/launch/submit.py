"""`run` for a scheduler that starts the ranks later: hands over the job and says what it is called."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.launch.preconditions import program_path
from shardwright.plan.plan import Plan

SUBMIT_TIMEOUT_SECONDS = 120.0


def submits(plan: Plan) -> bool:
    """Inside a Slurm allocation the ranks are started there and then; a Kubernetes cluster is never where `run` is."""
    launcher = plan.launch.launcher
    return launcher == "kubernetes" or (launcher == "slurm" and "SLURM_JOB_ID" not in os.environ)


def submit(plan: Plan, folder: Path, resume: str) -> int:
    """Prints the job's name and how to follow it. Returns 0. Raises Refusal where the scheduler takes no job."""
    if plan.launch.launcher == "kubernetes":
        if resume != "auto":
            raise _refusal("the pods always continue from the newest checkpoint", "Leave --resume out.")
        print(_command(["bash", "launch.sh"], folder).strip())
        print("watch        kubectl get pods -w")
        return 0
    # An absolute path: the job goes on in the folder, not in the shell that submitted it.
    chosen = resume if resume in ("auto", "never") else str(Path(resume).resolve())
    printed = _command(["sbatch", "--parsable", "launch/job.sh", chosen], folder)
    job = re.fullmatch(r"(\d+)(;\S+)?", printed.strip().splitlines()[-1] if printed.strip() else "")
    if job is None:
        raise _refusal(f"sbatch printed no job id: {printed.strip()[-200:]!r}", "Look for the job with squeue.")
    print(f"submitted    job {job[1]}")
    print(f"watch        squeue -j {job[1]}")
    print(f"log          {folder / 'run' / f'slurm-{job[1]}.log'}")
    print(f"stop         touch {folder / 'run' / 'stop'}  (saves a checkpoint; scancel {job[1]} does not)")
    return 0


def _command(command: list[str], folder: Path) -> str:
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
        raise _refusal(
            f"{command[0]} did not answer in {SUBMIT_TIMEOUT_SECONDS:.0f} s", "Is the scheduler up?"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:] or f"exit code {done.returncode}"
        raise _refusal(f"the job was not submitted: {said}", "Change the recipe's `launch` section and compile again.")
    return done.stdout


def _refusal(message: str, help: str) -> Refusal:
    return Refusal(Diagnostic(code="SW5208", message=message, help=help))
