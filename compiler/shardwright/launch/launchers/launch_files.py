"""The launch files of each target: scripts from templates, chosen by launch.launcher."""

from __future__ import annotations

import hashlib
import math

from shardwright.launch.launchers.kubernetes_kinds import KUBERNETES_KINDS, MAX_SERVICE_NAME
from shardwright.launch.launchers.kubernetes_launcher import apply_pod_patch
from shardwright.launch.launchers.launcher_table import LAUNCHERS, RANKS_STEP
from shardwright.launch.launchers.task_launcher import (
    MAX_TASK_NAME,
    TASK_FILE,
    error_events,
    merge_task_options,
)
from shardwright.layout.zero_settings import offloaded_bytes
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import POD_LABEL
from shardwright.utils.template_rendering import render_template

CORES_PER_GPU = 4
"""Cores that a Slurm job asks for per GPU of a node that it shares, where the recipe names none.
Slurm's own default is one core a node."""

_FILES = (
    files
    for row in LAUNCHERS.values()
    for files in (row.templates, *row.templates_by_kind.values())
)
SCRIPT_NAMES: frozenset[str] = frozenset(
    path for files in _FILES for path in files if path.endswith(".sh")
)


def is_launch_file(name: str) -> bool:
    """Return whether `launch_files` writes a file of this name."""
    return name in SCRIPT_NAMES or name == "train.py" or name.startswith("launch/")


def launch_files(plan: Plan) -> dict[str, bytes]:
    """Path in the compiled folder -> content. No host's name: those are bound when the run
    starts."""
    launcher, kubernetes = LAUNCHERS[plan.launch.launcher], plan.launch.kubernetes
    templates = dict(launcher.templates)
    if kubernetes is not None:
        templates |= launcher.templates_by_kind[kubernetes.kind]
    files = {
        path: text
        for path, template in templates.items()
        if (text := _render(f"launch/{template}", plan, path))  # nothing: no such file
    }
    if kubernetes is not None and kubernetes.pod_patch:
        kind = KUBERNETES_KINDS[kubernetes.kind]
        files[kind.pod_template] = apply_pod_patch(
            files[kind.pod_template], kubernetes.pod_patch, kind.container
        )
    if plan.launch.task is not None:
        options = plan.launch.task.options
        files[TASK_FILE] = merge_task_options(files[TASK_FILE], options)
    files["train.py"] = _render("launch/train.py.j2", plan, "train.py")
    if plan.launch.hostfile is not None:  # one that the recipe names replaces it
        files[plan.launch.hostfile] = _render("launch/hostfile.j2", plan, plan.launch.hostfile)
    return {name: text.encode("utf-8") for name, text in files.items()}


FINISHED_JOB_SECONDS = 7 * 24 * 3600
"""Is how long a job that has ended stays in the cluster."""
HOST_BYTES_PER_GPU = 8 * 2**30
"""Estimates what a rank takes of its host: CUDA's libraries, pinned buffers, weights as they are
read."""


def kubernetes_name(name: str, most: int = MAX_SERVICE_NAME) -> str:
    """The recipe's name as that of a Kubernetes object: lower-case letters, digits and hyphens, a
    letter first. A name that is cut ends with a hash, so that two never become one."""
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    text = (text if text[:1].isalpha() else f"run-{text}").rstrip("-")
    if len(text) <= most:
        return text
    suffix = hashlib.sha256(name.encode("utf-8")).hexdigest()[:8]
    return f"{text[: most - 9].rstrip('-')}-{suffix}"


def requested_memory_gib(plan: Plan) -> int:
    """Return the GiB of host memory that a pod asks for."""
    rank_bytes = plan.predicted.memory.peak_bytes if plan.is_cpu else HOST_BYTES_PER_GPU
    offloaded = offloaded_bytes(
        plan.optimizer.name, plan.strategy.offload, plan.model.total_parameters, plan.nodes
    )
    return math.ceil((plan.gpus_per_node * rank_bytes + offloaded) / 2**30)


def _render(template: str, plan: Plan, path: str) -> str:
    kubernetes = plan.launch.kubernetes
    kind = None if kubernetes is None else KUBERNETES_KINDS[kubernetes.kind]
    return render_template(
        template,
        plan=plan,
        launch=plan.launch,
        launcher=LAUNCHERS[plan.launch.launcher],
        path=path,
        root="../" * path.count("/"),  # the compiled folder, from the script's own
        kubernetes=kubernetes,
        kind=kind,
        node_rank=(kind and kind.node_rank_expression)
        or LAUNCHERS[plan.launch.launcher].node_rank_expression,
        name=kubernetes_name(plan.name, MAX_TASK_NAME if kind is None else kind.max_name),
        error_events=error_events(plan.launch.recovery),
        pod_label=POD_LABEL,
        memory_request_gib=requested_memory_gib(plan),
        finished_job_seconds=FINISHED_JOB_SECONDS,
        ranks_step=RANKS_STEP,
        shared_node_cores=plan.gpus_per_node * (1 if plan.is_cpu else CORES_PER_GPU),
    )
