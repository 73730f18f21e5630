"""Ray: how a job is submitted to a cluster that is up, and what `doctor` asks. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics.host_check import HostCheck, red, skipped_check
from shardwright.launch.launchers.job_scheduler import (
    missing_programs,
    run_scheduler_command,
    submission_refusal,
    submit_job,
)
from shardwright.plan.plan import Plan


def submit(plan: Plan, folder: Path, resume: str) -> None:
    if resume != "auto":
        raise submission_refusal(
            "the nodes always continue from the newest checkpoint", "Leave --resume out."
        )
    print(submit_job(["bash", "launch.sh"], folder).strip())
    print("watch        ray job list")


def checks(plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
    """Check the command and the cluster that it submits to. Only the job sees the nodes."""
    absent = missing_programs(("ray",), "ray")
    version = "" if absent else run_scheduler_command("ray", "--version").out.strip()
    yield HostCheck(name="commands", told=version or "ray", problems=absent)
    if not absent:
        answer = run_scheduler_command("ray", "job", "list")
        message = f"no Ray cluster takes jobs: {answer.said}"
        help = (
            "Set RAY_API_SERVER_ADDRESS=http://HEAD:8265, and start the cluster with ray[default]."
        )
        problems = () if answer.code == 0 else (red("SW5314", message, help),)
        yield HostCheck(name="cluster", told="takes jobs", problems=problems)
    yield skipped_check("nodes", f"their GPUs and network; that {folder} there is this folder")


def allocated_hosts() -> list[str]:
    """`doctor` is never in one of its jobs."""
    return []
