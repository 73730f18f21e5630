"""`doctor`: what would stop a run on these hosts, found before it is started. No torch here."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.resume_checkpoint import checkpoint_root
from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.diagnostics.host_check import MIN_BANDWIDTH_FRACTION, HostCheck, gbits, red
from shardwright.engines.engine_table import engine_of, private_name_purposes
from shardwright.launch.host_probe import (
    LIMIT_SECONDS,
    Probe,
    ProbedHost,
    ProbeRequest,
    RendezvousRequest,
    digest,
)
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.launch.preflight_checks import compiles_cpu_adam, tested_versions
from shardwright.layout.formats import element_bytes
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.zero_settings import fits_in_host_memory, offloaded_bytes
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import BUILT_IN_DATASETS, FLASH_ATTENTION_2
from shardwright.utils.installation import DEEPEP_MODULE

# The hosts of a run meet, as training would: at the master's address, in an all-reduce; their
# links are measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBandwidth:
    """Holds the bandwidths that the plan assumes, per GPU and one way. On CPUs no check compares
    with them."""

    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    is_cpu: bool


def check_rendezvous(
    plan: Plan, probes: Sequence[Probe], assumed: PlannedBandwidth, *, whole: bool, end: float
) -> list[HostCheck]:
    """The master's address and port from every host, an all-reduce over all of them, and how fast
    their links are."""
    if not probes:
        return []
    first = probes[0].result
    own = (
        None if LAUNCHERS[plan.launch.launcher].meets_by_host_name else first.facts.address
    )  # as launch.sh has it
    found = "127.0.0.1" if plan.nodes == 1 else own or first.host
    address = plan.launch.master_addr or found
    port = first.facts.free_port
    if port is None:
        text = f"{first.host}: port {plan.launch.master_port} is already in use"
        return [
            HostCheck(
                name="port",
                told="",
                problems=(red("SW5308", text, "Choose another launch.master_port."),),
            )
        ]
    seconds = max(2.0, end - time.monotonic() - 3.0)
    for rank, probe in enumerate(probes):
        world, cpu = len(probes), plan.is_cpu
        probe.ask(
            RendezvousRequest(
                rank=rank, world=world, address=address, port=port, seconds=seconds, cpu=cpu
            )
        )
    for probe in probes:
        probe.wait("met", end)
    met = [probe.result for probe in probes]
    apart = [
        red(
            "SW5308",
            (
                f"{probed.host}: cannot reach {first.host} at {address}:{port}: "
                f"{probed.met.unreachable}"
            ),
            (
                "Set launch.master_addr to an address of the first host that every host reaches, "
                "and open the ports between them."
            ),
        )
        for probed in met
        if probed.met.unreachable is not None
    ]
    port_check = HostCheck(
        name="rendezvous", told=f"every host reaches {address}:{port}", problems=tuple(apart)
    )
    wrong = [p for p in met if not apart and p.met.sum != len(probes)]
    among = (
        "all hosts"
        if whole
        else ", ".join(p.result.host for p in probes)
        + " only: the other hosts lack the pinned interface"
    )
    summed = tuple(
        red(
            "SW5309",
            f"{probed.host}: the all-reduce failed: {probed.met.error or probed.problem}",
            (
                "Set launch.env.GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs) to the network "
                "interface that the hosts share."
            ),
        )
        for probed in wrong
    )
    if apart:
        return [port_check]
    checks = [port_check, HostCheck(name="all-reduce", told=f"over {among}", problems=summed)]
    return checks if wrong else [*checks, links(met, assumed)]


def links(met: Sequence[ProbedHost], assumed: PlannedBandwidth) -> HostCheck:
    """The slowest link between two hosts, and between two GPUs of one, beside what the plan
    assumes."""
    told, problems = [], []
    to_next = [
        (p.met.links.to_next, f"{p.host} -> {met[(i + 1) % len(met)].host}")
        for i, p in enumerate(met)
    ]
    local = [(p.met.links.local, p.host) for p in met]
    between = min(((rate, where) for rate, where in to_next if rate), default=None)
    inside = min(((rate, where) for rate, where in local if rate), default=None)
    summed = min((rate for p in met if (rate := p.met.links.all_reduce)), default=None)
    if between:
        told.append(f"{gbits(between[0])} Gb/s between hosts ({between[1]} is the slowest)")
        if not assumed.is_cpu:
            told[-1] += f", {gbits(assumed.inter_node_bytes_per_second)} planned"
            if between[0] < MIN_BANDWIDTH_FRACTION * assumed.inter_node_bytes_per_second:
                key = f"cluster.inter_node_gbits_per_second={gbits(between[0])}"
                problems.append(
                    _slow(between[1], between[0], assumed.inter_node_bytes_per_second, key)
                )
    if summed:
        told.append(f"{gbits(summed)} Gb/s a host in an all-reduce")
    if inside:
        planned = assumed.intra_node_bytes_per_second
        told.append(
            f"{inside[0] / 1e9:.0f} GB/s between GPUs ({inside[1]}), {planned / 1e9:.0f} planned"
        )
        if inside[0] < MIN_BANDWIDTH_FRACTION * planned:
            key = f"cluster.intra_node_gbytes_per_second={inside[0] / 1e9:.0f}"
            problems.append(_slow(f"GPU 0 -> GPU 1 of {inside[1]}", inside[0], planned, key))
    return HostCheck(
        name="links",
        told="; ".join(told) or "one host with one device has no links",
        problems=tuple(problems),
    )


def _slow(where: str, rate: float, planned: float, key: str) -> Diagnostic:
    message = (
        f"{where}: the link gives {gbits(rate)} Gb/s, but the plan assumes {gbits(planned)} Gb/s"
    )
    help = (
        f"If the cluster gives no more, compile again with --set {key}: another layout "
        "may be faster. Otherwise check which interface NCCL uses (NCCL_DEBUG=INFO) and "
        "what else uses the network."
    )
    return found("SW5312", None, message, help, severity="warning")


FACTS_SECONDS = 10.0
"""Limits ssh and the host facts together; the rendezvous has the rest of LIMIT_SECONDS."""
MAX_CLOCK_SKEW_SECONDS = 10.0
FORWARDED = ("NCCL", "UCX")
"""DeepSpeed hands names with these beginnings to every host (launcher/runner.py)."""
NETWORK = (
    *FORWARDED,
    "TORCH_NCCL_",
    "RCCL_",
    "GLOO_",
    "FI_",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
INTERFACE_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheckInput:
    """Holds what the checks read. answers: those of the hosts that answered, in the hostfile's
    order."""

    plan: Plan
    folder: Path
    shared: bool
    answers: tuple[ProbedHost, ...]
    digest: str | None


def check_hosts(
    plan: Plan,
    folder: Path,
    hosts: Sequence[str],
    assumed: PlannedBandwidth,
    *,
    reach: str,
    shared: bool,
) -> tuple[HostCheck, ...]:
    """Run every check on every host at once. All of the plan's hosts, if present, also meet in an
    all-reduce.

    reach: one of host_probe.TRANSPORTS. shared: the folder should be on a shared file system.
    Raises Refusal where there is no ssh to reach the hosts with.
    """
    if reach == "ssh" and shutil.which("ssh") is None:
        raise Refusal(
            red(
                "SW5301",
                "this machine has no `ssh` command",
                "Install an ssh client (openssh-client).",
            )
        )
    end = time.monotonic() + LIMIT_SECONDS
    mark = f".doctor-{secrets.token_hex(8)}"
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / mark).touch()
    inputs = [
        plan.model.weights_path,
        None if plan.data.path in BUILT_IN_DATASETS else plan.data.path,
    ]
    request = ProbeRequest(
        folder=str(folder.resolve()),
        checkpoints=plan.checkpoint.directory,
        mark=mark,
        cpu=plan.is_cpu,
        inputs=tuple(path for path in inputs if path is not None),
        port=plan.launch.master_port,
        environment=_environment(plan),
        builds=compiles_cpu_adam(plan),
        private_names=private_name_purposes(plan),
    )
    probes = [Probe(host, reach=reach) for host in hosts]
    try:
        for probe in probes:
            probe.ask(request)
        for probe in probes:
            probe.wait("facts", end - LIMIT_SECONDS + FACTS_SECONDS)
        answered = [probe for probe in probes if probe.result.received]
        x = HostCheckInput(
            plan=plan,
            folder=folder,
            shared=shared,
            answers=tuple(probe.result for probe in answered),
            digest=digest(folder, plan.checkpoint.directory),
        )
        silent = [probe.result for probe in probes if not probe.result.received]
        command = {"ssh": "ssh {} true", "srun": "srun --overlap --nodelist={} true"}.get(reach, "")
        problems = tuple(
            red(
                "SW5301",
                f"{probed.host}: {probed.problem}",
                (
                    "Install shardwright and its packages on that host, at the same path as on "
                    "this machine."
                )
                if "No such file" in probed.problem or "No module" in probed.problem
                else (
                    f"`{command.format(probed.host)}` must work from this host without a prompt, "
                    "within a few seconds."
                )
                if command
                else "The host may be too busy to import the packages in time. Try again later.",
            )
            for probed in silent
        )
        checks = [
            HostCheck(
                name="this machine" if reach == "local" else reach,
                told=f"{len(probes)} of {len(probes)} hosts answer",
                problems=problems,
            )
        ]
        if answered:  # an unreachable host is never reported as ok
            checks.extend(
                check(x)
                for check in (*CHECKS, *([_build_tools] if compiles_cpu_adam(x.plan) else []))
            )
        if len(probes) >= plan.nodes:  # spare hosts meet with the others
            able = [p for p in answered if not _missing_interfaces(plan, p.result)]
            checks.extend(
                check_rendezvous(plan, able, assumed, whole=len(able) == len(probes), end=end)
            )
        return tuple(checks)
    finally:
        (folder / "run" / mark).unlink(missing_ok=True)
        for probe in probes:
            probe.close()


def _environment(plan: Plan) -> dict[str, str]:
    """Return the network variables that a rank will get: those that DeepSpeed forwards, and the
    plan's. The plan's other variables stay out: a PATH or LD_PRELOAD from another user's folder
    would run that folder's code."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    return {
        **forwarded,
        **{name: value for name, value in plan.launch.env if name.startswith(NETWORK)},
    }


def _engine(x: HostCheckInput) -> HostCheck:
    """Tell which engine runs, and whether it was ever tested on GPUs."""
    named = engine_of(x.plan)
    untried = not (x.plan.is_cpu or named.tested_on_gpus)
    layers = {"off": "without", "on": "with", "auto": "with or without"}[
        x.plan.model.transformer_engine
    ]
    told = (
        f"{named.title}: not tested on GPUs, {layers} Transformer Engine"
        if untried
        else named.title
    )
    return HostCheck(name="engine", told=told, checked=not untried)


def optional_packages(plan: Plan) -> dict[str, bool]:
    """Return the packages that only some plans need, and whether this one does."""
    return {
        "peft": plan.lora is not None,
        "torchao": plan.low_precision is not None and plan.target == "deepspeed",
        "flash_attn": plan.model.attention == FLASH_ATTENTION_2,
        DEEPEP_MODULE: plan.strategy.expert_dispatcher == "deepep",
        "emerging_optimizers": bool(plan.muon) and plan.target == "megatron",
    }


def _versions(x: HostCheckInput) -> HostCheck:
    planned = {name: x.plan.versions[name] for name in (*tested_versions(x.plan), "shardwright")}
    optional = optional_packages(x.plan)
    ours = platform.python_version()
    problems = []
    for probed in x.answers:
        there = {**dict.fromkeys((*planned, *optional)), **probed.facts.versions}
        for name, wanted in planned.items():
            if there[name] is None:
                problems.append(
                    red(
                        "SW5302",
                        f"{probed.host}: {name} is not installed",
                        f"Install {name} {wanted}.",
                    )
                )
            elif _differs(x, name, str(there[name]), wanted):
                text = (
                    f"{probed.host} has {name} {there[name]}, but the plan was made with {wanted}"
                )
                problems.append(red("SW5302", text, f"Install {name} {wanted} on {probed.host}."))
        problems += [
            red(
                "SW5302",
                f"{probed.host}: {name} is not installed, but the plan needs it",
                f"Install {name} on {probed.host}.",
            )
            for name, needed in optional.items()
            if needed and there[name] is None
        ]
        problems += [
            red(
                "SW1926",
                f"{probed.host}: {message}",
                f"Install the versions that the plan was made with on {probed.host}.",
            )
            for message in probed.facts.missing_names
        ]
        if probed.facts.python.split(".")[:2] != ours.split(".")[:2]:
            text = f"{probed.host} has Python {probed.facts.python}, but this machine has {ours}"
            problems.append(red("SW5302", text, f"Use the same environment on {probed.host}."))
    told = ", ".join(f"{name} {version}" for name, version in planned.items())
    return HostCheck(name="versions", told=f"Python {ours}, {told}", problems=tuple(problems))


def _differs(x: HostCheckInput, name: str, version: str, planned: str) -> bool:
    """Return whether `version` differs from the plan's. As for `run`, a tested version that all
    hosts share is accepted."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    base = Version(version).base_version
    if base == Version(planned).base_version:
        return False
    everywhere = {str(probed.facts.versions.get(name)) for probed in x.answers}
    tested = tested_versions(x.plan).get(name)
    return len(everywhere) > 1 or tested is None or not SpecifierSet(tested).contains(base)


def _folder(x: HostCheckInput) -> HostCheck:
    problems = []
    for probed in x.answers:
        found, sees_marker = probed.facts.digest, probed.facts.sees_marker
        path = x.folder.resolve()
        if found is None:
            text = f"{probed.host}: there is no compiled folder {str(path)!r}"
            problems.append(
                red(
                    "SW5303",
                    text,
                    "Mount the same file system there, or copy the folder to that path.",
                )
            )
        elif found != x.digest:
            text = f"{probed.host}: the files in {str(path)!r} differ from those on this machine"
            problems.append(
                red(
                    "SW5303",
                    text,
                    "Copy the folder to that host again: every rank reads its own host's files.",
                )
            )
        elif x.shared and not sees_marker:
            text = f"{probed.host}: {str(path)!r} is a copy, and cluster.shared_filesystem is true"
            problems.append(
                red(
                    "SW5303",
                    text,
                    "Mount the same folder on that host: every host reads the checkpoints.",
                )
            )
    told = "the same everywhere" if len(x.answers) > 1 else "complete"
    return HostCheck(name="folder", told=told, problems=tuple(problems))


def _inputs(x: HostCheckInput) -> HostCheck:
    problems = tuple(
        red(
            "SW5311",
            f"{probed.host}: there is no file or folder {path}",
            "Bring weights and data to the same path on every host.",
        )
        for probed in x.answers
        for path in probed.facts.absent
    )
    return HostCheck(name="inputs", told="weights and data are there", problems=problems)


def _devices(x: HostCheckInput) -> HostCheck:
    what, slots = "cores" if x.plan.is_cpu else "GPUs", x.plan.gpus_per_node
    problems = tuple(
        red(
            "SW5304",
            f"{probed.host} has {probed.facts.devices} {what}, but the plan needs {slots}",
            f"Remove {probed.host} from the hostfile, or compile for fewer {what} a node.",
        )
        for probed in x.answers
        # Ranks on CPUs may share cores: slow, and no obstacle.
        if probed.facts.devices < (1 if x.plan.is_cpu else slots)
    )
    problems += tuple(
        red(
            "SW5304",
            f"{probed.host}: {text}",
            (
                "Find the process with `nvidia-smi` and end it, or remove the host from the "
                "hostfile."
            ),
        )
        for probed in x.answers
        for text in probed.facts.busy
    )
    counts = sorted({probed.facts.devices for probed in x.answers})
    return HostCheck(
        name="devices", told=f"{' or '.join(map(str, counts))} {what} a host", problems=problems
    )


def _disk(x: HostCheckInput) -> HostCheck:
    row = OPTIMIZERS[x.plan.optimizer.name]
    states = element_bytes(x.plan.training.precision) + row.state_bytes
    needed: float = x.plan.model.total_parameters * states
    needed -= x.plan.matrix_elements * row.matrix_saving_bytes
    problems = []
    for probed in x.answers:
        free = probed.facts.free_bytes
        root = checkpoint_root(x.plan, x.folder)
        if not probed.facts.writable:
            text = f"{probed.host}: {str(root)!r} cannot be written"
            problems.append(
                red("SW5305", text, "Give the user who trains write permission for that folder.")
            )
        elif free < needed:
            text = (
                f"{probed.host} has {free / GIB:.1f} GiB free for checkpoints, but one takes "
                f"{needed / GIB:.1f} GiB"
            )
            problems.append(
                red(
                    "SW5305", text, "Free disk space, or put checkpoint.directory on a larger disk."
                )
            )
    return HostCheck(
        name="disk",
        told=f"room for a checkpoint of {needed / GIB:.1f} GiB",
        problems=tuple(problems),
    )


def _clocks(x: HostCheckInput) -> HostCheck:
    skews = {probed.host: probed.facts.time - probed.received for probed in x.answers}
    problems = tuple(
        red(
            "SW5306",
            f"{host}: the clock differs by {skew:+.0f} s from this machine's",
            f"Set the time of {host} (chrony, ntp).",
        )
        for host, skew in skews.items()
        if abs(skew) > MAX_CLOCK_SKEW_SECONDS
    )
    worst = max((abs(skew) for skew in skews.values()), default=0.0)
    return HostCheck(name="clocks", told=f"at most {worst:.1f} s apart", problems=problems)


def _interfaces(x: HostCheckInput) -> HostCheck:
    problems = tuple(
        red(
            "SW5307",
            (
                f"{probed.host}: {name}={value}, but the host's interfaces are "
                f"{', '.join(probed.facts.interfaces)}"
            ),
            f"Set launch.env.{name} to a name that every host has, or leave it out.",
        )
        for probed in x.answers
        for name, value in _missing_interfaces(x.plan, probed)
    )
    wanted = [f"{name}={value}" for name, value in _pinned_interfaces(x.plan)]
    return HostCheck(
        name="network", told=", ".join(wanted) or "no interface is pinned", problems=problems
    )


def _pinned_interfaces(plan: Plan) -> list[tuple[str, str]]:
    environment = _environment(plan)
    return [(name, environment[name]) for name in INTERFACE_NAMES if environment.get(name)]


def _missing_interfaces(plan: Plan, probed: ProbedHost) -> list[tuple[str, str]]:
    """Return (variable, value) of what names no interface of this host.

    Gloo opens each interface of its list (torch's ProcessGroupGloo). NCCL takes every interface
    that one name of its list matches: as a beginning, in full after `=`, none of them after `^`
    (src/misc/socket.cc).
    """
    there, missing = probed.facts.interfaces, list[tuple[str, str]]()
    for variable, value in _pinned_interfaces(plan):
        if variable.startswith("GLOO"):
            missing += [(variable, name) for name in value.split(",") if name not in there]
            continue
        names = value.removeprefix("^").removeprefix("=").split(",")
        is_exact = value.removeprefix("^").startswith("=")
        matches = {
            card: any(
                card == name or (not is_exact and card.startswith(name)) for name in names if name
            )
            for card in there
        }
        if not any(match != value.startswith("^") for match in matches.values()):
            missing.append((variable, value))
    return missing


def _memory(x: HostCheckInput) -> HostCheck:
    if x.plan.strategy.offload == "none":
        return HostCheck(name="host memory", told="nothing is offloaded")
    needed = offloaded_bytes(
        x.plan.optimizer.name, x.plan.strategy.offload, x.plan.model.total_parameters, x.plan.nodes
    )
    problems = tuple(
        red(
            "SW5310",
            (
                f"{probed.host} has {probed.facts.memory_bytes / GIB:.0f} GiB of host memory, but "
                f"the offloaded states take {needed / GIB:.0f} GiB"
            ),
            "Use more nodes, or compile with parallelism.offload: none.",
        )
        for probed in x.answers
        if not fits_in_host_memory(probed.facts.memory_bytes, needed)
    )
    return HostCheck(
        name="host memory",
        told=f"room for {needed / GIB:.1f} GiB of offloaded states",
        problems=problems,
    )


def _build_tools(x: HostCheckInput) -> HostCheck:
    problems = [
        red(
            "SW5317",
            (
                f"{probed.host}: {tool} is missing, and DeepSpeed compiles CPUAdam there for "
                "parallelism.offload"
            ),
            (
                "Install the CUDA toolkit of torch's version, ninja and g++ there, or compile with "
                "offload: none."
            ),
        )
        for probed in x.answers
        for tool in probed.facts.missing_tools
    ]
    problems += [
        red(
            "SW5318",
            (
                f"{probed.host}: no process holds the build lock {path!r}, so a run would wait "
                "for ever"
            ),
            f"If no other host builds in that folder, run `rm {path}` on {probed.host}.",
        )
        for probed in x.answers
        for path in probed.facts.stale_build_locks
    ]
    return HostCheck(name="builds", told="DeepSpeed can compile CPUAdam", problems=tuple(problems))


MIN_LOCKED_MEMORY_BYTES = GIB
"""Bounds what NCCL registers with an RDMA card. Distributions allow 64 KiB or 8 MiB."""
MIN_SHARED_MEMORY_BYTES = GIB
"""Is what NVIDIA's guides give a container (--shm-size=1g); Docker's default is 64 MiB."""


def _limits(x: HostCheckInput) -> HostCheck:
    """Check what ranks of several hosts lock for RDMA, and what ranks of one host share."""
    problems = []
    for probed in x.answers:
        locked, shared = probed.facts.locked_memory_bytes, probed.facts.shared_memory_bytes
        is_rdma = x.plan.nodes > 1 and not x.plan.is_cpu and probed.facts.has_rdma
        if is_rdma and locked is not None and locked < MIN_LOCKED_MEMORY_BYTES:
            text = (
                f"{probed.host}: a process may lock {locked // 1024:,} KiB of memory, which RDMA "
                "exceeds (ulimit -l)"
            )
            help = (
                "Set `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity "
                "for slurmd, or the capability IPC_LOCK for a container."
            )
            problems.append(found("SW5319", None, text, help, severity="warning"))
        if (
            x.plan.gpus_per_node > 1
            and not x.plan.is_cpu
            and shared is not None
            and shared < MIN_SHARED_MEMORY_BYTES
        ):
            text = (
                f"{probed.host}: /dev/shm has {shared // 2**20:,} MiB free, through which NCCL "
                f"joins the {x.plan.gpus_per_node} ranks"
            )
            help = "Start the container with --shm-size=1g or more, or remount /dev/shm larger."
            problems.append(found("SW5320", None, text, help, severity="warning"))
    return HostCheck(
        name="limits",
        told="locked memory and /dev/shm are enough",
        problems=tuple(problems),
    )


CHECKS = (
    *(_engine, _versions, _folder, _inputs, _devices, _disk, _clocks, _interfaces, _memory),
    _limits,
)
