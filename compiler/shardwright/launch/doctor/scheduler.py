"""`doctor` where a scheduler chooses the hosts: what would it say of the job? Nothing is submitted. No torch here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardwright.diagnostics import Diagnostic
from shardwright.launch.doctor.meeting import HostCheck, red
from shardwright.launch.preconditions import program_path
from shardwright.plan.plan import Plan

SECONDS = 15.0
"""For each command: a controller that is there answers in a few."""
SHARED = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb3", "glusterfs", "9p", "afs"),
    *("orangefs", "virtiofs", "fuse."),
)
"""File systems that several hosts mount, or may (fuse)."""
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


def ask(*command: str, cwd: Path | None = None) -> SchedulerReply:
    env = {**os.environ, "PATH": program_path()}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return SchedulerReply(code=None, out="", err=f"no answer in {SECONDS:.0f} s")
    except OSError as error:
        return SchedulerReply(code=None, out="", err=error.strerror or str(error))
    return SchedulerReply(code=done.returncode, out=done.stdout, err=done.stderr)


def missing(programs: tuple[str, ...], launcher: str) -> tuple[Diagnostic, ...]:
    return tuple(
        red(
            "SW5313",
            f"there is no `{program}` command here",
            f"Run doctor where jobs are submitted, or compile with another launcher than {launcher}.",
        )
        for program in programs
        if shutil.which(program, path=program_path()) is None
    )


def unchecked(name: str, told: str) -> HostCheck:
    return HostCheck(name=name, told=told, checked=False)


def slurm_checks(plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
    """Outside of an allocation: the commands, the controller, and what it would do with launch/job.sh."""
    absent = missing(("sbatch", "srun", "scontrol", "sinfo"), "slurm")
    version = ask("sbatch", "--version").out.strip() or "version unknown"
    yield HostCheck(name="commands", told=f"sbatch, srun, scontrol, sinfo: {version}", problems=absent)
    if not absent:
        ping = ask("sinfo", "--noheader", "--format=%R|%D")
        if ping.code != 0:
            yield HostCheck(
                name="controller",
                told="",
                problems=(red("SW5314", f"Slurm's controller does not answer: {ping.said}", "`sinfo` must answer."),),
            )
        else:
            yield HostCheck(name="controller", told="answers")
            yield _partition(plan, ping.out)
            yield _slurm_job(folder)
    yield _file_system(folder, shared=shared)
    yield unchecked(
        "nodes", "Slurm has yet to choose them. In an allocation (`salloc`, then doctor again) they are tried"
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
        red("SW5315", f"there is no partition {name}; there are {known}", "Set launch.slurm.partition to one of them.")
        for name in wanted.split(",")
        if name not in found
    ]
    nodes = sum(found.get(name, 0) for name in wanted.split(","))
    if not problems and nodes < plan.nodes:
        text = f"partition {wanted} has {nodes} nodes, the plan {plan.nodes}"
        problems.append(red("SW5315", text, "Compile for fewer nodes, or name another partition."))
    return HostCheck(name="partition", told=f"{wanted}: {nodes} nodes", problems=tuple(problems))


def _slurm_job(folder: Path) -> HostCheck:
    """Partition, account, limits, features, memory, options: the controller judges the job script and forgets it."""
    answer = ask("sbatch", "--test-only", "launch/job.sh", "auto", cwd=folder)
    if answer.code == 0:
        return HostCheck(name="job", told=answer.said or "Slurm would take it")
    help = "Change launch.slurm in the recipe, and compile again."
    return HostCheck(name="job", told="", problems=(red("SW5315", f"Slurm would refuse the job: {answer.said}", help),))


def _file_system(folder: Path, *, shared: bool) -> HostCheck:
    path = folder.resolve()
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "unknown")
    problems: tuple[Diagnostic, ...] = ()
    if shared and not kind.startswith(SHARED):
        text = f"{str(path)!r} is on {kind}, most likely a disk of this host; the job's nodes look at the same path"
        help = "Compile onto, or copy the folder to, a file system that every node mounts."
        problems = (Diagnostic(code="SW5316", severity="warning", message=text, help=help),)
    return HostCheck(name="folder", told=f"complete here, on {kind}", problems=problems)


def kubernetes_checks(plan: Plan, folder: Path) -> Iterator[HostCheck]:
    """kubectl, its cluster, and what that would do with the manifests."""
    kubernetes = plan.launch.kubernetes
    if kubernetes is None:
        raise ValueError("a plan for kubernetes has its section")
    absent = missing(("kubectl",), "kubernetes")
    version = ask("kubectl", "version", "--client").out
    yield HostCheck(
        name="commands", told="kubectl " + (version.split("Client Version: ")[-1].split() or [""])[0], problems=absent
    )
    where = (f"--namespace={kubernetes.namespace}",) if kubernetes.namespace else ()
    cluster = ask("kubectl", "version", "--output=json", f"--request-timeout={SECONDS - 5:.0f}s")
    reached = not absent and cluster.code == 0
    if not absent:
        context = ask("kubectl", "config", "current-context").out.strip() or "no context"
        help = "`kubectl get pods` must work here: choose a context with `kubectl config use-context`."
        problem = red("SW5314", f"no cluster answers kubectl ({context}): {cluster.said}", help)
        yield HostCheck(name="cluster", told=f"{context} answers", problems=() if reached else (problem,))
    if reached:
        yield _rights(plan, where)
        yield _dry_run(folder)
        yield from _objects(plan, where)
    else:
        yield unchecked("job", "no cluster was asked: rights, quota, the volume claim, the secret and the manifests")
    yield unchecked("pods", f"their GPUs, network and the image; that {kubernetes.directory} in them is this folder")


def _kind(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """(the resource that is created, the manifests)"""
    if plan.launch.kubernetes is not None and plan.launch.kubernetes.kind == "jobset":
        return "jobsets.jobset.x-k8s.io", ("jobset.yaml",)
    return "jobs.batch", ("service.yaml", "job.yaml")


def _rights(plan: Plan, where: tuple[str, ...]) -> HostCheck:
    resource, files = _kind(plan)
    wanted = [resource, *(["services"] if "service.yaml" in files else [])]
    answers = {name: ask("kubectl", "auth", "can-i", "create", name, *where) for name in wanted}
    problems = tuple(
        red("SW5315", f"you may not create {name}: {answer.said or 'no'}", "Ask for the right, or another namespace.")
        for name, answer in answers.items()
        if answer.code != 0
    )
    return HostCheck(name="rights", told=f"may create {' and '.join(wanted)}", problems=problems)


def _dry_run(folder: Path) -> HostCheck:
    """The API server judges each manifest whole, admission included, and keeps nothing."""
    problems, names = [], []
    for path in sorted((folder / "launch").glob("*.yaml")):
        verb = "apply" if path.name == "service.yaml" else "create"
        names.append(path.name)
        answer = ask("kubectl", verb, "--dry-run=server", "-f", f"launch/{path.name}", cwd=folder)
        if answer.code != 0:
            gone = f"kubectl delete -f launch/{path.name}"
            exists = "AlreadyExists" in answer.err
            help = (
                f"An earlier one is in the way: `{gone}`." if exists else "Change launch.kubernetes, and compile again."
            )
            problems.append(red("SW5315", f"Kubernetes would refuse launch/{path.name}: {answer.said}", help))
    return HostCheck(name="job", told=f"the API server takes {' and '.join(names)}", problems=tuple(problems))


def _objects(plan: Plan, where: tuple[str, ...]) -> Iterator[HostCheck]:
    """The claim and the secret: only whether they are there, never what is in them."""
    kubernetes = plan.launch.kubernetes
    assert kubernetes is not None
    for name, resource, wanted in (("volume", "pvc", kubernetes.volume_claim), ("secret", "secret", kubernetes.secret)):
        if wanted is None:
            continue
        answer = ask("kubectl", "get", resource, "--output=name", *where, "--", wanted)
        if answer.code == 0:
            yield HostCheck(name=name, told=wanted)
        elif "NotFound" in answer.err:
            problem = red("SW5315", f"there is no {resource} {wanted!r}", f"Make it, or set launch.kubernetes.{name}.")
            yield HostCheck(name=name, told="", problems=(problem,))
        else:
            yield unchecked(name, f"{wanted}: {answer.said}")


def allocated_hosts() -> list[str]:
    """The nodes of the Slurm allocation that this process is in, in Slurm's order."""
    return ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).out.split()
