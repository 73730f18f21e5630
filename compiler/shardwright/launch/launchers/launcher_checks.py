"""What a launcher cannot do with a recipe, and what its ranks would not see of a plan."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.launch.launchers.launcher_table import (
    LAUNCHERS,
    MULTI_NODE_LAUNCHER,
    resolve_launcher,
)
from shardwright.plan.hostfile import SHELL_SAFE
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import BUILT_IN_DATASETS, LaunchSection, Recipe


def check_launch(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """What the chosen launcher cannot do with these values."""
    launch, nodes, wrong = recipe.launch, recipe.cluster.nodes or 1, list[Diagnostic]()
    launcher = resolve_launcher(launch, nodes)
    if not launcher.is_multi_node and nodes > 1:
        message = f"launch.launcher: {launcher.name} starts one node, the cluster has {nodes}"
        help = f"Write `launcher: auto`: {MULTI_NODE_LAUNCHER} for several nodes."
        valid = ("auto", *(row.name for row in LAUNCHERS.values() if row.is_multi_node))
        wrong.append(found("SW5206", "launch.launcher", message, help, valid))
    if launcher.scheduler and launch.hostfile is not None:
        message = f"launch.hostfile: under {launcher.name} the hosts come from the scheduler"
        wrong.append(found("SW5207", "launch.hostfile", message, "Remove it."))
    if launcher.uses_hostfile:
        wrong.extend(_unquoted(launch, launcher.name))
    return tuple(wrong)


def unmounted_paths(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warnings for what the ranks read or write and their container or pod, by the recipe, does not
    mount. An image may have it all the same."""
    slurm, kubernetes = plan.launch.slurm, plan.launch.kubernetes
    if slurm is not None and slurm.container is not None:
        mounted = tuple(mount.split(":")[1] for mount in slurm.container.mounts)
        where, help = (
            "launch.slurm.container.mounts",
            "Add it there, or name the path as the container has it.",
        )
    elif kubernetes is not None:
        mounted = (kubernetes.mount_path,)
        where, help = (
            "launch.kubernetes.mount_path",
            "Bring it to the volume, and name it as the pods see it.",
        )
    else:
        return ()
    parts = [
        part
        for data in (plan.data, plan.validation and plan.validation.data)
        if data
        for part in (data, *data.mixture)
    ]
    named = [(("data", "path"), part.path) for part in parts if part.path not in BUILT_IN_DATASETS]
    named += [
        (("model", "source"), plan.model.weights_path),
        (("checkpoint", "directory"), plan.checkpoint.directory),
    ]
    outside = f"is not below {' or '.join(mounted) or 'any of'} ({where})"
    return tuple(
        found("SW5209", key, f"{'.'.join(key)}: {path} {outside}", help, severity="warning")
        for key, path in dict.fromkeys(named)
        if path is not None
        and path.startswith("/")
        and not any(_below(path, folder) for folder in mounted)
    )


def _below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _unquoted(launch: LaunchSection, launcher: str) -> list[Diagnostic]:
    values: list[tuple[tuple[str, ...], str]] = [
        (("launch", "env", k), v) for k, v in sorted(launch.env)
    ]
    if launch.master_addr is not None:
        values.append((("launch", "master_addr"), launch.master_addr))
    why = f"cannot pass through {launcher}, for which DeepSpeed does not quote"
    help = "Letters, digits and _ @ % + = : , . / - can. Set other values in launch.setup_script."
    return [
        found("SW5205", key, f"{'.'.join(key)}: {value!r} {why}", help)
        for key, value in values
        if not SHELL_SAFE.fullmatch(value)
    ]
