"""The launch files of each target: scripts from templates, chosen by launch.launcher."""

from __future__ import annotations

from shardwright.launch.launchers.kubernetes_launcher import apply_pod_patch
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import POD_CONTAINER
from shardwright.utils.template_rendering import render_template

PATCHED_MANIFESTS = ("launch/job.yaml", "launch/jobset.yaml")

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
    templates = launcher.templates_by_kind.get(
        "" if kubernetes is None else kubernetes.kind, launcher.templates
    )
    files = {
        path: text
        for path, template in templates.items()
        if (text := _render(f"launch/{template}", plan, path))  # nothing: no such file
    }
    if kubernetes is not None and kubernetes.pod_patch:
        files |= {
            path: apply_pod_patch(files[path], kubernetes.pod_patch)
            for path in PATCHED_MANIFESTS
            if path in files
        }
    files["train.py"] = _render("launch/train.py.j2", plan, "train.py")
    if plan.launch.hostfile is not None:  # one that the recipe names replaces it
        files[plan.launch.hostfile] = _render("launch/hostfile.j2", plan, plan.launch.hostfile)
    return {name: text.encode("utf-8") for name, text in files.items()}


def kubernetes_name(name: str) -> str:
    """The recipe's name as that of a Service, which its Job and pods share: lower-case letters,
    digits and hyphens, a letter first, short enough for a pod's number behind it."""
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    return (text if text[:1].isalpha() else f"run-{text}").rstrip("-")[:52].rstrip("-")


def _render(template: str, plan: Plan, path: str) -> str:
    return render_template(
        template,
        plan=plan,
        launch=plan.launch,
        launcher=LAUNCHERS[plan.launch.launcher],
        path=path,
        root="../" * path.count("/"),  # the compiled folder, from the script's own
        container=POD_CONTAINER,
        service_name=kubernetes_name(plan.name),
        shared_node_cores=plan.gpus_per_node * (1 if plan.is_cpu else CORES_PER_GPU),
    )
