"""Kubernetes: how its jobs are submitted, and what `doctor` asks the API server. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics.host_check import HostCheck, red, skipped_check
from shardwright.launch.launchers.job_scheduler import (
    COMMAND_TIMEOUT_SECONDS,
    missing_programs,
    run_scheduler_command,
)
from shardwright.launch.launchers.job_submission import submission_refusal, submit_job
from shardwright.plan.plan import Plan


def submit(plan: Plan, folder: Path, resume: str) -> None:
    if resume != "auto":
        raise submission_refusal(
            "the pods always continue from the newest checkpoint", "Leave --resume out."
        )
    print(submit_job(["bash", "launch.sh"], folder).strip())
    print("watch        kubectl get pods -w")


def checks(plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
    """kubectl, its cluster, and what that would do with the manifests."""
    kubernetes = plan.launch.kubernetes
    if kubernetes is None:
        raise ValueError("a plan for kubernetes has its section")
    absent = missing_programs(("kubectl",), "kubernetes")
    version = run_scheduler_command("kubectl", "version", "--client").out
    yield HostCheck(
        name="commands",
        told="kubectl " + (version.split("Client Version: ")[-1].split() or [""])[0],
        problems=absent,
    )
    where = (f"--namespace={kubernetes.namespace}",) if kubernetes.namespace else ()
    cluster = run_scheduler_command(
        "kubectl",
        "version",
        "--output=json",
        f"--request-timeout={COMMAND_TIMEOUT_SECONDS - 5:.0f}s",
    )
    reached = not absent and cluster.code == 0
    if not absent:
        context = (
            run_scheduler_command("kubectl", "config", "current-context").out.strip()
            or "no context"
        )
        help = (
            "`kubectl get pods` must work here: choose a context with `kubectl config use-context`."
        )
        problem = red("SW5314", f"no cluster answers kubectl ({context}): {cluster.said}", help)
        yield HostCheck(
            name="cluster", told=f"{context} answers", problems=() if reached else (problem,)
        )
    if reached:
        yield _rights(plan, where)
        yield _dry_run(folder)
        yield from _objects(plan, where)
    else:
        yield skipped_check(
            "job",
            "no cluster was asked: rights, quota, the volume claim, the secret and the manifests",
        )
    yield skipped_check(
        "pods",
        f"their GPUs, network and the image; that {kubernetes.directory} in them is this folder",
    )


def _kind(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """(the resource that is created, the manifests)"""
    if plan.launch.kubernetes is not None and plan.launch.kubernetes.kind == "jobset":
        return "jobsets.jobset.x-k8s.io", ("jobset.yaml",)
    return "jobs.batch", ("service.yaml", "job.yaml")


def _rights(plan: Plan, where: tuple[str, ...]) -> HostCheck:
    resource, files = _kind(plan)
    wanted = [resource, *(["services"] if "service.yaml" in files else [])]
    answers = {
        name: run_scheduler_command("kubectl", "auth", "can-i", "create", name, *where)
        for name in wanted
    }
    problems = tuple(
        red(
            "SW5315",
            f"you may not create {name}: {answer.said or 'no'}",
            "Ask for the right, or another namespace.",
        )
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
        answer = run_scheduler_command(
            "kubectl", verb, "--dry-run=server", "-f", f"launch/{path.name}", cwd=folder
        )
        if answer.code != 0:
            gone = f"kubectl delete -f launch/{path.name}"
            exists = "AlreadyExists" in answer.err
            help = (
                f"An earlier one is in the way: `{gone}`."
                if exists
                else "Change launch.kubernetes, and compile again."
            )
            problems.append(
                red("SW5315", f"Kubernetes would refuse launch/{path.name}: {answer.said}", help)
            )
    return HostCheck(
        name="job", told=f"the API server takes {' and '.join(names)}", problems=tuple(problems)
    )


def _objects(plan: Plan, where: tuple[str, ...]) -> Iterator[HostCheck]:
    """The claim and the secret: only whether they are there, never what is in them."""
    kubernetes = plan.launch.kubernetes
    assert kubernetes is not None
    for name, resource, wanted in (
        ("volume", "pvc", kubernetes.volume_claim),
        ("secret", "secret", kubernetes.secret),
    ):
        if wanted is None:
            continue
        answer = run_scheduler_command(
            "kubectl", "get", resource, "--output=name", *where, "--", wanted
        )
        if answer.code == 0:
            yield HostCheck(name=name, told=wanted)
        elif "NotFound" in answer.err:
            problem = red(
                "SW5315",
                f"there is no {resource} {wanted!r}",
                f"Make it, or set launch.kubernetes.{name}.",
            )
            yield HostCheck(name=name, told="", problems=(problem,))
        else:
            yield skipped_check(name, f"{wanted}: {answer.said}")


def allocated_hosts() -> list[str]:
    """`doctor` is never in one of its jobs."""
    return []
