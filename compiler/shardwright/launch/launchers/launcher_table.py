"""The launchers, a row each: `launch.launcher` in a recipe and in plan.json. A new one is a row and
its templates.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.diagnostics import Diagnostic, found
from shardwright.diagnostics.secret_values import MASK, is_secret_name, without_credentials
from shardwright.launch.launchers.kubernetes_kinds import KUBERNETES_KINDS
from shardwright.plan.folder_paths import HOSTFILE, SETUP_SCRIPT
from shardwright.plan.hostfile import SHELL_SAFE
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import (
    BUILT_IN_DATASETS,
    KubernetesSection,
    LaunchSection,
    Recipe,
    RecoverySection,
    SlurmSection,
)
from shardwright.recipe.task_options import TASK_SERVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """templates: path in the compiled folder -> template. kinds: other ones, by the kind that its
    section says. program: what `run` needs here to start it.

    is_multi_node: whether it starts more than one. uses_hostfile: it reaches the nodes by name; the
    others are started on
        each node, which knows only its number: node_rank_expression, in the shell's words. by_hand:
        nothing here can start the other nodes.
    unquoted: it hands the folder's path to the nodes' shells without quotes.
    interrupt: what ends the launcher's processes and the ranks at once; SIGTERM asks some to stop.

    scheduler: the module that knows it (launch/), where one chooses the hosts; the section of the
    launcher's name is
        its own.
    allocation: the variable that stands inside of one, where `run` starts the ranks there and then.
    allocated_nodes_variable:
        the variable with their number.
    has_separate_filesystem: the ranks see other files than this machine. meets_by_host_name: they
    meet at a node's name, not its address. restarts_in_allocation: `run --supervise` restarts the
    ranks on the allocation's nodes.
    own_restart_keys: the keys of `launch.recovery` that its scheduler's restarts take; None where
    it refuses the section. restart_limit: what limits them, where `retries` does not.
    untested: how its files were checked, where no run has used them.
    """

    name: str
    templates: Mapping[str, str]
    templates_by_kind: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    program: str | None = None
    is_multi_node: bool = True
    uses_hostfile: bool = False
    by_hand: bool = False
    node_rank_expression: str | None = None
    passes_path_unquoted: bool = False
    interrupt: signal.Signals = signal.SIGINT
    scheduler: str | None = None
    allocation: str | None = None
    allocated_nodes_variable: str | None = None
    has_separate_filesystem: bool = False
    meets_by_host_name: bool = False
    restarts_in_allocation: bool = False
    own_restart_keys: tuple[str, ...] | None = None
    restart_limit: str | None = None
    untested: str | None = None

    @property
    def submits(self) -> bool:
        """Return whether `run` submits a job here, whose ranks start later."""
        return self.scheduler is not None and not self.is_allocated

    @property
    def can_restart(self) -> bool:
        """Return whether `run --supervise` can start the ranks again."""
        return self.restarts_in_allocation or not (self.scheduler or self.by_hand)

    @property
    def is_allocated(self) -> bool:
        return self.allocation is not None and self.allocation in os.environ


_ROWS = (
    Launcher(name="local", templates={"launch.sh": "local.sh.j2"}, is_multi_node=False),
    Launcher(
        name="pdsh",
        templates={"launch.sh": "pdsh.sh.j2", "launch/pdsh_setup.sh": "pdsh_setup.sh.j2"},
        program="pdsh",
        uses_hostfile=True,
        passes_path_unquoted=True,
        # A signal would be answered with a remote pkill. The ranks end once their output has no
        # reader.
        interrupt=signal.SIGKILL,
    ),
    Launcher(
        name="no_ssh",
        templates={"launch.sh": "node.sh.j2"},
        by_hand=True,
        node_rank_expression="${NODE_RANK:?give the number of this node, from 0}",
    ),
    Launcher(
        name="slurm",
        templates={
            "launch.sh": "slurm.sh.j2",
            "launch/job.sh": "slurm_job.sh.j2",
            "launch/preflight.sh": "slurm_preflight.sh.j2",
            "launch/watch.sh": "slurm_watch.sh.j2",
            "launch/node.sh": "node.sh.j2",
        },
        program="sbatch",
        scheduler="shardwright.launch.launchers.slurm_launcher",
        node_rank_expression="${SLURM_NODEID:?srun starts this file}",
        allocation="SLURM_JOB_ID",
        allocated_nodes_variable="SLURM_JOB_NUM_NODES",
        meets_by_host_name=True,
        restarts_in_allocation=True,
        interrupt=signal.SIGTERM,  # srun only warns at a first SIGINT
    ),
    Launcher(
        name="openmpi",
        templates={"launch.sh": "openmpi.sh.j2", "launch/rank.sh": "openmpi_rank.sh.j2"},
        program="mpirun",
        uses_hostfile=True,
    ),
    Launcher(
        name="kubernetes",
        templates={"launch.sh": "kubernetes.sh.j2", "launch/node.sh": "node.sh.j2"},
        templates_by_kind={name: kind.templates for name, kind in KUBERNETES_KINDS.items()},
        program="kubectl",
        scheduler="shardwright.launch.launchers.kubernetes_launcher",
        node_rank_expression="${JOB_COMPLETION_INDEX:?an Indexed Job starts this file}",
        has_separate_filesystem=True,
    ),
    Launcher(
        name="skypilot",
        templates={
            "launch.sh": "skypilot.sh.j2",
            "launch/task.yaml": "skypilot_task.yaml.j2",
            "launch/node.sh": "node.sh.j2",
        },
        program="sky",
        scheduler="shardwright.launch.launchers.task_launcher",
        node_rank_expression="${SKYPILOT_NODE_RANK:?SkyPilot starts this file}",
        has_separate_filesystem=True,
        own_restart_keys=("retries",),
        untested="SkyPilot's published schema (0.14)",
    ),
    Launcher(
        name="dstack",
        templates={
            "launch.sh": "dstack.sh.j2",
            "launch/task.yaml": "dstack_task.yaml.j2",
            "launch/node.sh": "node.sh.j2",
        },
        program="dstack",
        scheduler="shardwright.launch.launchers.task_launcher",
        node_rank_expression="${DSTACK_NODE_RANK:?dstack starts this file}",
        has_separate_filesystem=True,
        own_restart_keys=("on",),
        restart_limit="dstack restarts for as long as its `retry.duration`",
        untested="dstack's published schema (0.22)",
    ),
    Launcher(
        name="ray",
        templates={
            "launch.sh": "ray.sh.j2",
            "launch/ray_nodes.py": "ray_nodes.py.j2",
            "launch/node.sh": "node.sh.j2",
        },
        program="ray",
        scheduler="shardwright.launch.launchers.ray_launcher",
        node_rank_expression="${NODE_RANK:?launch/ray_nodes.py starts this file}",
        own_restart_keys=("retries",),
    ),
)
LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in _ROWS}
RANKS_STEP = "ranks"
"""Names the job step of the ranks under Slurm."""
MIN_JOBSET_NODES = 4
"""Nodes from which `launch.kubernetes.kind: auto` is a JobSet: a Job restarts pods one by one, and
counts each."""
SINGLE_NODE_LAUNCHER, MULTI_NODE_LAUNCHER = "local", "pdsh"
"""`auto`, where the recipe has no scheduler's section."""


def resolve_launcher(launch: LaunchSection, nodes: int) -> Launcher:
    """auto, settled by what the recipe holds."""
    if launch.launcher != "auto":
        return LAUNCHERS[launch.launcher]
    given = (row for row in _ROWS if row.scheduler and getattr(launch, row.name, None) is not None)
    return next(given, LAUNCHERS[SINGLE_NODE_LAUNCHER if nodes == 1 else MULTI_NODE_LAUNCHER])


def plan_launch(launch: LaunchSection, nodes: int, *, reads_hosts: bool) -> LaunchSection:
    """Return the launch section of a plan: `auto` resolved, files by their path in the compiled
    folder.

    reads_hosts: whether the engine reads a hostfile.
    """
    launcher = resolve_launcher(launch, nodes)
    has_hostfile = reads_hosts and (
        nodes == 1 or launch.hostfile is not None or not launcher.uses_hostfile
    )
    return dataclasses.replace(
        launch,
        launcher=launcher.name,
        hostfile=HOSTFILE if has_hostfile else None,
        env=tuple(sorted(launch.env)),
        env_from=tuple(sorted(set(launch.env_from))),
        setup_script=None if launch.setup_script is None else SETUP_SCRIPT,
        slurm=(launch.slurm or SlurmSection(mem="0")) if launcher.name == "slurm" else None,
        kubernetes=_with_kind(launch.kubernetes, nodes) if launcher.name == "kubernetes" else None,
        task=launch.task if launcher.name in TASK_SERVICES else None,
    )


def _with_kind(section: KubernetesSection | None, nodes: int) -> KubernetesSection | None:
    """Resolve `kind: auto`."""
    if section is None or section.kind != "auto":
        return section
    return dataclasses.replace(section, kind="jobset" if nodes >= MIN_JOBSET_NODES else "job")


# What a launcher cannot do with a recipe, and what its ranks would not see of a plan.


def check_launch(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return what the chosen launcher does not support of these values."""
    launch, nodes, wrong = recipe.launch, recipe.cluster.nodes or 1, list[Diagnostic]()
    launcher = resolve_launcher(launch, nodes)
    if not launcher.is_multi_node and nodes > 1:
        message = f"launch.launcher: {launcher.name} starts one node, but the cluster has {nodes}"
        help = f"Write `launcher: auto`, which takes {MULTI_NODE_LAUNCHER} for several nodes."
        valid = ("auto", *(row.name for row in LAUNCHERS.values() if row.is_multi_node))
        wrong.append(found("SW5206", "launch.launcher", message, help, valid))
    if launcher.scheduler and launch.hostfile is not None:
        message = f"launch.hostfile: under {launcher.name} the hosts come from the scheduler"
        wrong.append(found("SW5207", "launch.hostfile", message, "Remove it."))
    restart_keys = launcher.own_restart_keys
    if launch.kubernetes is not None:
        kind = _with_kind(launch.kubernetes, nodes)
        if kind is not None and KUBERNETES_KINDS[kind.kind].replans:
            restart_keys = ("min_nodes",)
    if launch.recovery is not None and restart_keys is not None:
        wrong += _recovery_errors(launch.recovery, launcher, restart_keys)
    elif launch.recovery is not None and not launcher.can_restart:
        does = "schedules" if launcher.scheduler else "does not start"
        message = (
            f"launch.recovery: {launcher.name} {does} the nodes, so nothing here restarts them"
        )
        help = {
            "kubernetes": "Remove it, as `launch.kubernetes.restarts` restarts the pods, or write "
            "`kind: jobset`.",
        }.get(launcher.name, "Remove it, or use another launcher.")
        wrong.append(found("SW5214", "launch.recovery", message, help))
    elif (
        launch.recovery is not None
        and launch.recovery.spares
        and not (launcher.uses_hostfile or launcher.restarts_in_allocation)
    ):
        message = f"launch.recovery.spares: {launcher.name} has no hostfile with further hosts"
        help = "Remove it, or use a launcher with a hostfile."
        wrong.append(found("SW5214", "launch.recovery.spares", message, help))
    if launcher.uses_hostfile:
        values: list[tuple[tuple[str, ...], str]] = [
            (("launch", "env", k), v) for k, v in sorted(launch.env)
        ]
        if launch.master_addr is not None:
            values.append((("launch", "master_addr"), launch.master_addr))
        why = f"cannot pass through {launcher.name}: DeepSpeed does not quote values for it"
        help = (
            "Use letters, digits and _ @ % + = : , . / ^ - only. Set other values in "
            "launch.setup_script."
        )
        wrong += [
            found("SW5205", key, f"{'.'.join(key)}: {_shown(key[-1], value)} {why}", help)
            for key, value in values
            if not SHELL_SAFE.fullmatch(value)
        ]
    return tuple(wrong)


def _recovery_errors(
    recovery: RecoverySection, launcher: Launcher, keys: tuple[str, ...]
) -> Iterator[Diagnostic]:
    """Yield SW5222 for each setting that the scheduler's own restarts do not have."""
    for key in dataclasses.fields(RecoverySection):
        value = getattr(recovery, key.name)
        if key.name in keys or value == key.default:
            continue
        message = f"launch.recovery.{key.name}: {launcher.name}'s own restarts have no such setting"
        help = "Remove it, or use a launcher whose runs `run --supervise` restarts."
        yield found("SW5222", f"launch.recovery.{key.name}", message, help)


_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*)|^~(?=/|$)")
"""Matches what a shell would expand."""


def unexpanded_variables(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Warn of values of launch.env that refer to a variable or to a home folder: they reach the
    ranks as they are written."""
    warnings = []
    for name, value in sorted(recipe.launch.env):
        if (reference := _REFERENCE.search(value)) is None:
            continue
        shown = reference[0] + "}" * reference[0].startswith("${")
        message = (
            f"launch.env.{name}: {shown} is not expanded; the ranks get {_shown(name, value)} as "
            "it is written"
        )
        help = f"Write `export {name}=...` in launch.setup_script, which is a bash script."
        if value in (f"${name}", f"${{{name}}}"):
            help = f"Write `env_from: [{name}]` under `launch` to pass its value on."
        key = ("launch", "env", name)
        warnings.append(found("SW5212", key, message, help, severity="warning"))
    return tuple(warnings)


def unsaved_recovery_warning(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Warn where a restart has no checkpoint to go on from."""
    if recipe.launch.recovery is None or recipe.checkpoint.every_steps is not None:
        return ()
    message = (
        "launch.recovery: checkpoint.every_steps is null, so every restart begins at step 1 again"
    )
    help = "Set checkpoint.every_steps: auto, or a number of steps."
    return (found("SW5215", "checkpoint.every_steps", message, help, severity="warning"),)


def short_stop_warning(plan: Plan, save_seconds: float) -> tuple[Diagnostic, ...]:
    """Warn where Slurm's signal comes too late: the ranks finish the step that they are in, and
    save.

    save_seconds: the estimate of one save
    """
    slurm, step_seconds = plan.launch.slurm, plan.predicted.time.step_seconds
    needed = step_seconds + save_seconds
    if slurm is None or slurm.signal_seconds >= needed:
        return ()
    message = (
        f"launch.slurm.signal_seconds is {slurm.signal_seconds}, but a step ({step_seconds:.0f} s) "
        f"and a save ({save_seconds:.0f} s) take {needed:.0f} s: the time limit would end the job "
        "before its checkpoint is complete"
    )
    help = f"Set launch.slurm.signal_seconds to {math.ceil(2 * needed)} or more."
    key = "launch.slurm.signal_seconds"
    return (found("SW5213", key, message, help, severity="warning"),)


def _shown(name: str, value: str) -> str:
    """Return the value of a variable for a message."""
    return MASK if is_secret_name(name) else repr(without_credentials(value))


def untested_launcher_warning(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warn where no run has used the launch files, and where `retries` does not limit restarts."""
    launcher, kubernetes = LAUNCHERS[plan.launch.launcher], plan.launch.kubernetes
    key, name, checked = "launch.launcher", launcher.name, launcher.untested
    if kubernetes is not None:
        key, name = "launch.kubernetes.kind", kubernetes.kind
        checked = KUBERNETES_KINDS[kubernetes.kind].untested
    warnings = []
    if checked is not None:
        message = f"{key}: {name} has not run; its files were checked against {checked} only"
        help = "Train a few steps first, and look whether they end and resume as they should."
        warnings.append(found("SW5221", key, message, help, severity="warning"))
    if launcher.restart_limit is not None and plan.launch.recovery is not None:
        key = "launch.recovery.retries"
        message = f"{key} has no effect: {launcher.restart_limit}"
        help = "Stop a run that fails again and again by hand."
        warnings.append(found("SW5223", key, message, help, severity="warning"))
    return tuple(warnings)


def unmounted_paths(plan: Plan) -> tuple[Diagnostic, ...]:
    """Warnings for what the ranks read or write and their container or pod, by the recipe, does not
    mount. An image may have it all the same."""
    slurm, kubernetes, task = plan.launch.slurm, plan.launch.kubernetes, plan.launch.task
    if task is not None and task.volumes:
        mounted = tuple(task.volumes)
        where, help = (
            "launch.task.volumes",
            "Copy the file or folder to a volume, and write the path as the nodes have it.",
        )
    elif slurm is not None and slurm.container is not None:
        mounted = tuple(mount.split(":")[1] for mount in slurm.container.mounts)
        where, help = (
            "launch.slurm.container.mounts",
            "Add the path to the mounts, or write the path as the container has it.",
        )
    elif kubernetes is not None:
        mounted = (kubernetes.mount_path,)
        where, help = (
            "launch.kubernetes.mount_path",
            "Copy the file or folder to the volume, and write the path as the pods have it.",
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
        and not any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in mounted)
    )
