"""Check this machine before a run starts on it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.engines.engine_table import engine_of, missing_name_errors
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.layout.formats import FORMATS
from shardwright.plan.folder_paths import HOSTFILE, SPARE_HOSTS
from shardwright.plan.hostfile import SHELL_SAFE, Host, read_hostfile
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from shardwright.train.experiment_trackers import missing_trackers
from shardwright.utils.child_processes import program_path
from shardwright.utils.file_io import read_regular_text_file
from shardwright.utils.installation import (
    install_command,
    missing_compiler,
    missing_deepep,
    missing_flash_attention,
    missing_peft,
    missing_torchao,
)

# Locks of torch's extension builds that nobody holds any more.
#
# torch.utils.cpp_extension takes a build by creating `lock` in its folder, and keeps it open until
# it
# is done (torch/utils/file_baton.py). A process that was killed meanwhile leaves the file behind,
# and
# every later build of that extension on the host waits for it without end.


STALE_LOCK_AGE_SECONDS = 600.0
"""A younger lock may be of a host that shares the folder."""


def compiles_cpu_adam(plan: Plan) -> bool:
    """Return whether DeepSpeed compiles CPUAdam when a run starts (ds_config.json's torch_adam)."""
    return (
        plan.strategy.offload != "none"
        and not plan.is_cpu
        and not engine_of(plan).traits.overlaps_host_update
    )


def extensions_root() -> Path:
    """Return the folder in which torch builds extensions, without importing torch."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(cache) / "torch_extensions"


def stale_build_locks(root: Path | None = None) -> tuple[Path, ...]:
    """Lock files that no process of this host has open, and that were made some time ago."""
    root = extensions_root() if root is None else root
    now, locks = time.time(), []
    for path in sorted((*root.glob("*/lock"), *root.glob("*/*/lock"))):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > STALE_LOCK_AGE_SECONDS:
                locks.append(path)
    held: set[str] = set()
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error, OSError):  # of another user
            held.update(file.path for file in process.open_files())
    return tuple(path for path in locks if str(path.resolve()) not in held)


def tested_versions(plan: Plan) -> dict[str, str]:
    """Package -> the versions that are tested."""
    return {**engine_of(plan).packages, "transformers": ">=5.23,<6", "torch": ">=2.10,<3"}


def check_versions(plan: Plan) -> list[str]:
    """Warnings for versions that differ from the plan's inside the tested range; Refusal outside
    it."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    warnings, errors, missing = [], [], []
    for name, tested in tested_versions(plan).items():
        try:
            planned, installed = plan.versions[name], metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(f"{name} {plan.versions[name]}")
            continue
        if Version(installed).base_version == Version(planned).base_version:
            continue
        if SpecifierSet(tested).contains(Version(installed).base_version):
            warnings.append(
                f"warning[SW6002]: the plan was made with {name} {planned}, but {installed} is "
                f"installed (tested: {tested})"
            )
        else:
            text = (
                f"the plan was made with {name} {planned}, but {installed} is installed (tested: "
                f"{tested})"
            )
            help = f"Install {name} {planned}, or compile the recipe again here."
            errors.append(Diagnostic(code="SW6002", message=text, help=help))
    if missing:
        are = "are" if len(missing) > 1 else "is"
        text = f"the plan was made with {', '.join(missing)}, which {are} not installed here"
        extra = engine_of(plan).extra
        help = f"Run pip install 'shardwright[{extra}]', or compile the recipe for another target."
        errors.append(Diagnostic(code="SW6002", message=text, help=help))
    if errors:
        raise Refusal(*errors)
    return warnings


def check_preflight(plan: Plan, folder: Path, hostfile: Path | None) -> None:
    """Raises Refusal with every obstacle at once."""
    if obstacles := tuple(_preflight_errors(plan, folder, hostfile)):
        raise Refusal(*obstacles)


def _preflight_errors(plan: Plan, folder: Path, hostfile: Path | None) -> Iterator[Diagnostic]:
    yield from missing_name_errors(plan)
    if plan.lora is not None and (absent := missing_peft()):
        yield absent
    if engine_of(plan).low_precision and plan.low_precision and (absent := missing_torchao()):
        yield absent
    if plan.model.attention == FLASH_ATTENTION_2 and (absent := missing_flash_attention()):
        yield absent
    if plan.strategy.expert_dispatcher == "deepep" and (absent := missing_deepep()):
        yield absent
    if plan.model.kernels == "compile" and (absent := missing_compiler(is_cpu=plan.is_cpu)):
        yield absent
    if plan.is_cpu and not FORMATS[plan.training.precision].cpu:
        help = "Set training.precision to bf16 or fp32 and compile again; fp16 plans run on GPUs."
        yield found("SW6004", None, "fp16 does not run on a CPU: DeepSpeed refuses it", help)
    program = engine_of(plan).program
    if shutil.which(program, path=program_path()) is None:
        help = f"Run {install_command('deepspeed')} and use its `shardwright` command."
        yield found("SW6005", None, f"there is no `{program}` command in this environment", help)
    yield from missing_trackers(plan)
    weights = plan.model.weights_path
    launcher = LAUNCHERS[plan.launch.launcher]
    # Pods have a volume of their own, which need not be mounted here.
    if weights is not None and not launcher.has_separate_filesystem and not Path(weights).is_dir():
        help = (
            "Restore the folder (plan.json has the revision of weights from the hub), or "
            "compile again."
        )
        yield found(
            "SW6007",
            None,
            f"the pretrained weights are missing: there is no folder {weights!r}",
            help,
        )
    if launcher.by_hand:
        message = f"launch.launcher is {launcher.name}, which does not start the other nodes"
        help = (
            f"Run on each node: NODE_RANK=0...{plan.nodes - 1} MASTER_ADDR=<address of node "
            "0> bash launch.sh"
        )
        yield found("SW6005", None, message, help)
    if launcher.name == "local" and compiles_cpu_adam(plan):
        for path in stale_build_locks():
            text = (
                f"no process holds the build lock {str(path)!r}, so DeepSpeed would wait for ever"
            )
            yield found(
                "SW5318", None, text, f"If no other host builds in that folder, run `rm {path}`."
            )
    yield from scheduler_errors(plan)
    yield from hostfile_errors(plan, folder, hostfile)


def scheduler_errors(plan: Plan, spares: int = 0) -> Iterator[Diagnostic]:
    """Yield what keeps a run from its scheduler. spares: nodes that the allocation may
    have beyond the plan's."""
    launcher = LAUNCHERS[plan.launch.launcher]
    name, program = launcher.name, launcher.program
    if program is not None and shutil.which(program, path=program_path()) is None:
        help = (
            f"Install `{program}`, start the run on a machine that has it, or compile with "
            f"another launcher than {name}."
        )
        yield found(
            "SW6005",
            None,
            f"launch.launcher is {name}, but this machine has no `{program}` command",
            help,
        )
    nodes = (
        None
        if launcher.allocated_nodes_variable is None
        else os.environ.get(launcher.allocated_nodes_variable)
    )
    if nodes is not None and nodes not in map(str, range(plan.nodes, plan.nodes + spares + 1)):
        message = (
            f"the {name.capitalize()} allocation has {nodes} nodes, but the plan needs {plan.nodes}"
        )
        help = (
            f"Ask for --nodes={plan.nodes}, leave the allocation (`run` then submits a job), or "
            "compile again."
        )
        yield found("SW6003", None, message, help)


def hostfile_errors(plan: Plan, folder: Path, hostfile: Path | None) -> Iterator[Diagnostic]:
    """The hosts of a hostfile against the plan's rank map."""
    launcher, compiled = LAUNCHERS[plan.launch.launcher], folder / "launch" / "hostfile"
    if not launcher.uses_hostfile:
        if hostfile is not None:
            reaching = "` or `".join(row.name for row in LAUNCHERS.values() if row.uses_hostfile)
            where = (
                f"the nodes that {launcher.name} chooses"
                if launcher.is_multi_node
                else "the machine that `run` is started on"
            )
            help = f"Leave --hostfile out, or compile with `launcher: {reaching}`."
            yield found(
                "SW6003", None, f"--hostfile cannot be used: the ranks run on {where}", help
            )
        return
    if hostfile is None and not compiled.is_file():
        yield missing_hostfile(plan)
        return
    path = hostfile or compiled
    try:
        read_hostfile(str(path), read_regular_text_file(path), plan.nodes, plan.gpus_per_node)
    except Refusal as refusal:
        yield from refusal.diagnostics
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        message = f"the hostfile {str(path)!r} cannot be read: {cause}"
        yield found(
            "SW6003", None, message, "Write a text file with a line `name slots=N` for each node."
        )
    if launcher.passes_path_unquoted and not SHELL_SAFE.fullmatch(str(folder.resolve())):
        message = (
            f"{launcher.name} cannot pass on the folder's path {str(folder.resolve())!r}, "
            f"because {launcher.name} does not quote paths"
        )
        help = (
            "Move the folder to a path of letters, digits and @%+=:,./-_ only, the same on "
            "every host."
        )
        yield found("SW6005", None, message, help)


def read_hosts_and_spares(plan: Plan, folder: Path, hostfile: Path | None) -> tuple[Host, ...]:
    """Return the hosts of a run, in the plan's order, and the spare ones of `launch.recovery` after
    them. Raises Refusal."""
    recovery, path = plan.launch.recovery, hostfile or folder / HOSTFILE
    try:
        text = read_regular_text_file(path)
        if hostfile is None and (folder / SPARE_HOSTS).is_file():
            text += read_regular_text_file(folder / SPARE_HOSTS)
    except (OSError, UnicodeDecodeError):
        raise Refusal(missing_hostfile(plan)) from None
    spares = 0 if recovery is None else recovery.spares
    return read_hostfile(str(path), text, plan.nodes, plan.gpus_per_node, spares)


def missing_hostfile(plan: Plan) -> Diagnostic:
    message = f"the plan needs {plan.nodes} nodes, but there is no hostfile"
    return found(
        "SW6003", None, message, "Give `--hostfile FILE` with a line `name slots=N` for each node."
    )
