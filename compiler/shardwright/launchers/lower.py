"""The launch files of each target: scripts from templates, chosen by launch.launcher."""

from __future__ import annotations

import shlex

from shardwright.diagnostics import Diagnostic
from shardwright.ir.recipe import POD_CONTAINER, LaunchSection, Recipe
from shardwright.launchers.pod_patch import with_pod_patch
from shardwright.launchers.table import LAUNCHERS, SEVERAL_NODES, launcher_of
from shardwright.plan.hosts import SAFE_UNQUOTED
from shardwright.plan.plan import Plan
from shardwright.resources import templates_dir

PATCHED = ("launch/job.yaml", "launch/jobset.yaml")

_FILES = (files for row in LAUNCHERS.values() for files in (row.templates, *row.kinds.values()))
SCRIPTS: frozenset[str] = frozenset(path for files in _FILES for path in files if path.endswith(".sh"))


def launch_files(plan: Plan) -> dict[str, bytes]:
    """Path in the compiled folder -> content. No host's name: those are bound when the run starts."""
    launcher, kubernetes = LAUNCHERS[plan.launch.launcher], plan.launch.kubernetes
    templates = launcher.kinds.get("" if kubernetes is None else kubernetes.kind, launcher.templates)
    files = {path: render(f"launch/{template}", plan, path) for path, template in templates.items()}
    if kubernetes is not None and kubernetes.pod_patch:
        files |= {path: with_pod_patch(files[path], kubernetes.pod_patch) for path in PATCHED if path in files}
    files["train.py"] = render("launch/train.py.j2", plan, "train.py")
    if plan.launch.hostfile is not None:  # one that the recipe names replaces it
        files[plan.launch.hostfile] = render("launch/hostfile.j2", plan, plan.launch.hostfile)
    return {name: text.encode("utf-8") for name, text in files.items()}


def check_launch(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """What the chosen launcher cannot do with these values."""
    launch, nodes, found = recipe.launch, recipe.cluster.nodes or 1, list[Diagnostic]()
    launcher = launcher_of(launch, nodes)
    if not launcher.several_nodes and nodes > 1:
        found.append(
            Diagnostic(
                code="SW5206",
                message=f"launch.launcher: {launcher.name} starts one node, the cluster has {nodes}",
                help=f"Write `launcher: auto`: {SEVERAL_NODES} for several nodes.",
                key=("launch", "launcher"),
                valid=("auto", *(row.name for row in LAUNCHERS.values() if row.several_nodes)),
            )
        )
    if launcher.scheduler and launch.hostfile is not None:
        found.append(
            Diagnostic(
                code="SW5207",
                message=f"launch.hostfile: under {launcher.name} the hosts come from the scheduler",
                help="Remove it.",
                key=("launch", "hostfile"),
            )
        )
    if launcher.needs_hosts:
        found.extend(_unquoted(launch, launcher.name))
    return tuple(found)


def unseen_paths(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warnings for what the ranks read or write and their container or pod, by the recipe, does not mount. An image may
    have it all the same."""
    slurm, kubernetes = plan.launch.slurm, plan.launch.kubernetes
    if slurm is not None and slurm.container is not None:
        mounted = tuple(mount.split(":")[1] for mount in slurm.container.mounts)
        where, help = "launch.slurm.container.mounts", "Add it there, or name the path as the container has it."
    elif kubernetes is not None:
        mounted = (kubernetes.mount_path,)
        where, help = "launch.kubernetes.mount_path", "Bring it to the volume, and name it as the pods see it."
    else:
        return ()
    parts = [
        part for data in (plan.data, plan.validation and plan.validation.data) if data for part in (data, *data.mixture)
    ]
    named = [(("data", "path"), part.path) for part in parts if part.path != "python-stdlib"]
    named += [(("model", "source"), plan.model.weights_path), (("checkpoint", "directory"), plan.checkpoint.directory)]
    return tuple(
        Diagnostic(
            code="SW5209",
            severity="warning",
            message=f"{'.'.join(key)}: {path} is not below {' or '.join(mounted) or 'any of'} ({where})",
            help=help,
            key=key,
        )
        for key, path in dict.fromkeys(named)
        if path is not None and path.startswith("/") and not any(_below(path, folder) for folder in mounted)
    )


def _below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _unquoted(launch: LaunchSection, launcher: str) -> list[Diagnostic]:
    values: list[tuple[tuple[str, ...], str]] = [(("launch", "env", k), v) for k, v in sorted(launch.env)]
    if launch.master_addr is not None:
        values.append((("launch", "master_addr"), launch.master_addr))
    return [
        Diagnostic(
            code="SW5205",
            message=f"{'.'.join(key)}: {value!r} cannot pass through {launcher}, for which DeepSpeed does not quote",
            help="Letters, digits and _ @ % + = : , . / - can. Set other values in launch.setup_script.",
            key=key,
        )
        for key, value in values
        if not SAFE_UNQUOTED.fullmatch(value)
    ]


def kubernetes_name(name: str) -> str:
    """The recipe's name as that of a Service, which its Job and pods share: lower-case letters, digits and hyphens, a
    letter first, short enough for a pod's number behind it."""
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-")
    return (text if text[:1].isalpha() else f"run-{text}").rstrip("-")[:52].rstrip("-")


def render(template: str, plan: Plan, path: str) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # `check` asks the engines, and renders nothing

    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["kubernetes_name"] = kubernetes_name
    # root: the compiled folder, from the script's own.
    return environment.get_template(template).render(
        plan=plan,
        launch=plan.launch,
        launcher=LAUNCHERS[plan.launch.launcher],
        path=path,
        root="../" * path.count("/"),
        container=POD_CONTAINER,
    )
