"""Kubernetes: how its jobs are submitted, and what `doctor` asks the API server. No torch here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from shardwright.diagnostics.host_check import HostCheck, red, skipped_check
from shardwright.launch.launchers.job_scheduler import (
    COMMAND_TIMEOUT_SECONDS,
    missing_programs,
    run_scheduler_command,
    submission_refusal,
    submit_job,
)
from shardwright.launch.launchers.kubernetes_kinds import KUBERNETES_KINDS
from shardwright.plan.plan import Plan
from shardwright.recipe.kubernetes_pod_patch import POD_TEMPLATE_TYPE, PodFieldType, pod_fields_of
from shardwright.recipe.recipe_types import POD_CONTAINER
from shardwright.utils.json_values import JsonObject, JsonValue

# A Kubernetes manifest with the recipe's patch of the pod template merged in, as `kubectl patch`
# merges one.


ANY = PodFieldType(holds="map", item="any")


def apply_pod_patch(manifest: str, patch: JsonObject, container: str = POD_CONTAINER) -> str:
    """manifest: one with a pod template, whose comments stay. container: what the ranks' container,
    `ranks` in a patch, is called there."""
    if container != POD_CONTAINER:
        patch = _rename_container(patch, container)
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 2**16  # a line is never folded
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(manifest)
    pods = document["spec"]
    while "containers" not in pods.get("spec", {}):  # in a Job, JobSet, runtime or RayJob
        pods = pods.get("rayClusterSpec", pods)
        for group in ("replicatedJobs", "workerGroupSpecs"):
            pods = pods[group][0] if group in pods else pods
        pods = pods["spec"] if "spec" in pods else pods["template"]
    _merge_fields(pods, patch, POD_TEMPLATE_TYPE)
    _follow_patch(pods["spec"], patch, container)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _rename_container(patch: JsonObject, container: str) -> JsonObject:
    spec = patch.get("spec")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("containers"), list):
        return patch
    containers = [
        {**each, "name": container} if each["name"] == POD_CONTAINER else each
        for each in cast("list[JsonObject]", spec["containers"])
    ]
    return {**patch, "spec": {**spec, "containers": containers}}


def _follow_patch(pod: MutableMapping[str, Any], patch: JsonObject, name: str) -> None:
    """Change what a patch implies and does not say: a pod on its host's network asks the cluster's
    DNS for the other pods, and a limit of memory is the request, too."""
    if pod.get("hostNetwork") and "dnsPolicy" not in pod:
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    containers = cast(JsonObject, patch.get("spec") or {}).get("containers") or []
    for container in cast("list[JsonObject]", containers):
        resources = cast(JsonObject, container.get("resources") or {})
        limits, requests = (
            cast(JsonObject, resources.get(key) or {}) for key in ("limits", "requests")
        )
        if container["name"] == name and "memory" in limits and "memory" not in requests:
            ranks = next(each for each in pod["containers"] if each["name"] == name)
            ranks["resources"]["requests"].pop("memory", None)
            if not ranks["resources"]["requests"]:
                del ranks["resources"]["requests"]


def _merge_fields(target: MutableMapping[str, Any], patch: JsonObject, type_name: str) -> None:
    known = pod_fields_of(type_name)
    for field, value in patch.items():
        kind, below = known.get(field, ANY), target.get(field)
        if value is None:
            target.pop(field, None)
        elif kind.merge_key and isinstance(below, MutableSequence):
            for item in cast("list[JsonObject]", value):
                name = item[kind.merge_key]
                same = next((each for each in below if each.get(kind.merge_key) == name), None)
                if same is None:
                    below.append(_quoted(item, PodFieldType(holds="one", item=kind.item)))
                else:
                    _merge_fields(
                        same,
                        {key: value for key, value in item.items() if key != kind.merge_key},
                        kind.item,
                    )
        elif isinstance(value, Mapping) and isinstance(below, MutableMapping):
            _merge_fields(below, value, kind.item if kind.holds == "one" else ANY.item)
        else:
            target[_key(field, type_name)] = _quoted(value, kind)


def _quoted(value: JsonValue, kind: PodFieldType) -> Any:
    """Return a copy without null values and with every text in quotes."""
    if isinstance(value, Mapping):
        type_name = kind.item if kind.holds == "one" else ANY.item
        known = pod_fields_of(type_name)
        given = {key: below for key, below in value.items() if below is not None}
        return {
            _key(key, type_name): _quoted(below, known.get(key, ANY))
            for key, below in given.items()
        }
    if isinstance(value, list):
        return [_quoted(item, PodFieldType(holds="one", item=kind.item)) for item in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) else value


def _key(name: str, type_name: str) -> str:
    """The user's own, such as a label's, in quotes: `on` is no text to every reader of YAML."""
    return name if pod_fields_of(type_name) else DoubleQuotedScalarString(name)


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
    kind = KUBERNETES_KINDS[kubernetes.kind]
    if reached:
        answers = {
            name: run_scheduler_command("kubectl", "auth", "can-i", "create", name, *where)
            for name in kind.resources
        }
        problems = tuple(
            red(
                "SW5315",
                f"you may not create {name}: {answer.said or 'no'}",
                "Ask an administrator for the right, or use another namespace.",
            )
            for name, answer in answers.items()
            if answer.code != 0
        )
        yield HostCheck(
            name="rights", told=f"may create {' and '.join(kind.resources)}", problems=problems
        )
        # The API server judges each manifest whole, admission included, and keeps nothing.
        refused, names = [], []
        for path in kind.dry_run:
            verb = "apply" if path == kind.applied else "create"
            names.append(path.removeprefix("launch/"))
            answer = run_scheduler_command(
                "kubectl", verb, "--dry-run=server", "-f", path, cwd=folder
            )
            if answer.code != 0:
                gone = f"kubectl delete -f {path}"
                exists = "AlreadyExists" in answer.err
                no_controller = kind.controller and "no matches for kind" in answer.err
                help = (
                    f"Delete the earlier object first: `{gone}`."
                    if exists
                    else f"Install {kind.controller}, or set launch.kubernetes.kind: job, and "
                    "compile again."
                    if no_controller
                    else "Change launch.kubernetes, and compile again."
                )
                refused.append(
                    red("SW5315", f"Kubernetes would refuse {path}: {answer.said}", help)
                )
        yield HostCheck(
            name="job",
            told=f"the API server takes {' and '.join(names)}",
            problems=tuple(refused),
        )
        yield from _objects(plan, where)
    else:
        yield skipped_check(
            "job",
            "without a cluster: rights, quota, the volume claim, the secret and the manifests",
        )
    yield skipped_check(
        "pods",
        f"their GPUs, network and the image; that {kubernetes.directory} in them is this folder",
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
                f"Create the {name}, or change launch.kubernetes.{name}.",
            )
            yield HostCheck(name=name, told="", problems=(problem,))
        else:
            yield skipped_check(name, f"{wanted}: {answer.said}")


def allocated_hosts() -> list[str]:
    """`doctor` is never in one of its jobs."""
    return []
