"""Slurm: how its jobs are submitted, and what `doctor` asks it. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from shardwright.diagnostics import Diagnostic
from shardwright.diagnostics.host_check import HostCheck, red, skipped_check
from shardwright.launch.launchers.job_scheduler import (
    missing_programs,
    run_scheduler_command,
    submission_refusal,
    submit_job,
)
from shardwright.plan.plan import Plan

SHARED = (
    *(
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "wekafs",
        "panfs",
        "cifs",
        "smb3",
        "glusterfs",
        "9p",
        "afs",
    ),
    *("orangefs", "virtiofs", "fuse."),
)
"""File systems that several hosts mount, or may (fuse)."""


def submit(plan: Plan, folder: Path, resume: str) -> None:
    # An absolute path: the job goes on in the folder, not in the shell that submitted it.
    chosen = resume if resume in ("auto", "never") else str(Path(resume).resolve())
    printed = submit_job(["sbatch", "--parsable", "launch/job.sh", chosen], folder)
    job = re.fullmatch(r"(\d+)(;\S+)?", printed.strip().splitlines()[-1] if printed.strip() else "")
    if job is None:
        raise submission_refusal(
            f"sbatch printed no job id: {printed.strip()[-200:]!r}", "Find the job with `squeue`."
        )
    print(f"submitted    job {job[1]}")
    print(f"watch        squeue -j {job[1]}")
    print(f"log          {folder / 'run' / f'slurm-{job[1]}.log'}")
    print(
        f"stop         touch {folder / 'run' / 'stop'}  (saves a checkpoint; scancel {job[1]} "
        "leaves Slurm's KillWait for it, 30 s by default)"
    )


def checks(plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
    """Outside of an allocation: the commands, the controller, and what it would do with
    launch/job.sh."""
    absent = missing_programs(("sbatch", "srun", "scontrol", "sinfo"), "slurm")
    version = run_scheduler_command("sbatch", "--version").out.strip() or "version unknown"
    yield HostCheck(
        name="commands", told=f"sbatch, srun, scontrol, sinfo: {version}", problems=absent
    )
    if not absent:
        ping = run_scheduler_command("sinfo", "--noheader", "--format=%R|%D")
        if ping.code != 0:
            yield HostCheck(
                name="controller",
                told="",
                problems=(
                    red(
                        "SW5314",
                        f"Slurm's controller does not answer: {ping.said}",
                        "`sinfo` must answer.",
                    ),
                ),
            )
        else:
            yield HostCheck(name="controller", told="answers")
            yield _partition(plan, ping.out)
            # Partition, account, limits, features, memory, options: the controller judges the job
            # script and forgets it.
            answer = run_scheduler_command(
                "sbatch", "--test-only", "launch/job.sh", "auto", cwd=folder
            )
            if answer.code == 0:
                yield HostCheck(name="job", told=answer.said or "Slurm would take it")
            else:
                help = "Change launch.slurm in the recipe, and compile again."
                problem = red("SW5315", f"Slurm would refuse the job: {answer.said}", help)
                yield HostCheck(name="job", told="", problems=(problem,))
    path = folder.resolve()
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next(
        (mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "unknown"
    )
    problems: tuple[Diagnostic, ...] = ()
    if shared and not kind.startswith(SHARED):
        text = (
            f"{str(path)!r} is on {kind}, most likely a disk of this host, but the job's "
            "nodes read the same path"
        )
        help = "Compile onto, or copy the folder to, a file system that every node mounts."
        problems = (Diagnostic(code="SW5316", severity="warning", message=text, help=help),)
    yield HostCheck(name="folder", told=f"complete here, on {kind}", problems=problems)
    yield skipped_check(
        "nodes",
        ("Slurm chooses them later. Inside an allocation (`salloc`) doctor checks them"),
    )


def _partition(plan: Plan, rows: str) -> HostCheck:
    """rows: name|number of nodes, as sinfo prints them."""
    found: dict[str, int] = {}
    for row in rows.splitlines():
        name, _, count = row.partition("|")
        found[name] = found.get(name, 0) + (int(count) if count.isdigit() else 0)
    slurm = plan.launch.slurm
    wanted = slurm.partition if slurm is not None else None
    if wanted is None:
        return HostCheck(name="partition", told="the cluster's default")
    known = ", ".join(found) or "none"
    problems = [
        red(
            "SW5315",
            f"there is no partition {name}; there are {known}",
            "Set launch.slurm.partition to one of them.",
        )
        for name in wanted.split(",")
        if name not in found
    ]
    nodes = sum(found.get(name, 0) for name in wanted.split(","))
    if not problems and nodes < plan.nodes:
        text = f"partition {wanted} has {nodes} nodes, but the plan needs {plan.nodes}"
        problems.append(red("SW5315", text, "Compile for fewer nodes, or name another partition."))
    return HostCheck(name="partition", told=f"{wanted}: {nodes} nodes", problems=tuple(problems))


def allocated_hosts() -> list[str]:
    """The nodes of the Slurm allocation that this process is in, in Slurm's order."""
    return host_names(os.environ.get("SLURM_JOB_NODELIST", ""))


def host_names(nodes: str) -> list[str]:
    """Return the names that Slurm's short form, such as gpu-[3,7-9], stands for."""
    return run_scheduler_command("scontrol", "show", "hostnames", nodes).out.split()
