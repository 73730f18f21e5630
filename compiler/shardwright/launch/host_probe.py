"""Run on each host for `doctor`: report the host's facts, then meet the other hosts.

Imports no torch before the facts are sent. Reads one JSON object a line on standard input and
answers with one a line: first the facts, then, where requested, the result of the rendezvous.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from shardwright.engines.engine_table import ENGINES
from shardwright.launch.preflight_checks import stale_build_locks
from shardwright.utils.installation import DEEPEP_MODULE, installed_version
from shardwright.utils.json_values import JsonObject
from shardwright.utils.private_names import Purpose, private_name_errors

# What `doctor` and its probe on each host say to each other, one JSON object a line. A probe
# imports it first.
#
# What a probe of another version leaves out has its default, and what it says beside is passed
# over.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """inputs: paths or globs that every host needs. port: the master's; None where any free one
    does. builds: whether DeepSpeed compiles an optimizer on each host. private_names: what of the
    plan needs private names of packages."""

    folder: str
    checkpoints: str
    mark: str
    cpu: bool
    inputs: tuple[str, ...]
    port: int | None
    environment: Mapping[str, str]
    builds: bool = False
    private_names: tuple[Purpose, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """time: of the host's clock, seconds. missing_names: a message for each package that lacks
    private names which the plan needs. digest: of the compiled files, None where there is no
    plan. sees_marker: whether the folder is the one that doctor looks at. busy: a sentence for each
    GPU that somebody holds. absent: of the inputs. free_port: held for the rendezvous, None where
    another process listens on the master's. missing_tools: what a build needs and is not there.
    stale_build_locks: that builds left behind. has_rdma: whether it has InfiniBand or RoCE cards.
    locked_memory_bytes: the most that a process may lock, None without a limit.
    shared_memory_bytes: free in /dev/shm, None where there is none."""

    time: float = 0.0
    hostname: str = ""
    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    missing_names: tuple[str, ...] = ()
    digest: str | None = None
    sees_marker: bool = False
    interfaces: tuple[str, ...] = ()
    address: str | None = None
    devices: int = 0
    busy: tuple[str, ...] = ()
    free_bytes: int = 0
    writable: bool = False
    memory_bytes: int = 0
    absent: tuple[str, ...] = ()
    free_port: int | None = None
    missing_tools: tuple[str, ...] = ()
    stale_build_locks: tuple[str, ...] = ()
    has_rdma: bool = False
    locked_memory_bytes: int | None = None
    shared_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousRequest:
    """address, port: of the first host. seconds: what it may take."""

    rank: int
    world: int
    address: str
    port: int
    seconds: float
    cpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second; None where there was nothing to measure."""

    to_next: float | None = None
    all_reduce: float | None = None
    local: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousResult:
    """Holds the result of a rendezvous: unreachable, an error, or a sum over all hosts and the
    links."""

    unreachable: str | None = None
    error: str | None = None
    sum: int | None = None
    links: LinkRates = LinkRates()


def host_facts_to_json(facts: HostFacts) -> JsonObject:
    return {"kind": "facts", **asdict(facts)}


def rendezvous_result_to_json(met: RendezvousResult) -> JsonObject:
    told = {name: value for name, value in asdict(met).items() if value is not None}
    if met.sum is None:
        del told["links"]
    return {"kind": "met", **told}


# A probe on every host at once, over ssh, each with a limit. No torch here.


LIMIT_SECONDS = 18.0
"""Limits all of `doctor`, from the first ssh to the last answer."""
CONNECT_SECONDS = 5
_SSH_NOISE = re.compile(r"Warning: Permanently added|^\s*$")


@dataclass(slots=True)
class ProbedHost:
    """Holds one host's answers. received: time.time() of its facts, 0 until then. problem: why
    there are none."""

    host: str
    facts: HostFacts = field(default_factory=HostFacts)
    received: float = 0.0
    met: RendezvousResult = field(default_factory=RendezvousResult)
    problem: str = ""


TRANSPORTS = ("local", "ssh", "srun")
"""Lists the ways to reach a host: local is this machine, srun a node of this process's Slurm
allocation."""


class Probe:
    """A running probe."""

    def __init__(self, host: str, *, reach: str) -> None:
        self.result = ProbedHost(host=host)
        # As DeepSpeed forwards them. The other variables go through the pipe: a command line can be
        # read by all.
        values = [
            f"{name}={value}" for name, value in os.environ.items() if name.startswith("PYTHON")
        ]
        remote = ["env", *values, sys.executable, "-P", "-m", "shardwright.launch.host_probe"]
        ssh = ["ssh", *shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")), "-oBatchMode=yes"]
        ssh += [f"-oConnectTimeout={CONNECT_SECONDS}", "--", host, "exec " + shlex.join(remote)]
        # A step beside others on that node, with what the allocation has there.
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
        srun = [*step, "--cpu-bind=none", "--quiet", *remote]
        self._process = subprocess.Popen(
            {"local": remote, "ssh": ssh, "srun": srun}[reach],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._errors: list[str] = []
        self._answered = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def ask(self, message: ProbeRequest | RendezvousRequest) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(message)) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended; what it said last tells why

    def wait(self, kind: str, deadline: float) -> None:
        """Until it has answered with `kind`, has ended, or time.monotonic() is past `deadline`."""
        with self._answered:
            self._answered.wait_for(
                lambda: self._has(kind) or self._ended,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        if not self._has(kind) and not self.result.problem:
            if not self._ended:
                self.result.problem = "no answer within the limit"
            elif self._errors:
                self.result.problem = self._errors[-1]
            else:
                self.result.problem = f"ended with code {self._process.returncode}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _has(self, kind: str) -> bool:
        return (
            self.result.received > 0 if kind == "facts" else self.result.met != RendezvousResult()
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER_PREFIX):
                message = json.loads(line.removeprefix(ANSWER_PREFIX))
                with self._answered:
                    if message["kind"] == "facts":
                        self.result.facts = msgspec.convert(message, HostFacts)
                        self.result.received = time.time()
                    else:
                        self.result.met = msgspec.convert(message, RendezvousResult)
                    self._answered.notify_all()
        self._process.wait()
        time.sleep(0.1)  # what it says last on standard error
        with self._answered:
            self._ended = True
            self._answered.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(
            line.rstrip() for line in self._process.stderr if not _SSH_NOISE.search(line)
        )


_ENGINES = (name for engine in ENGINES.values() for name in engine.packages)
PACKAGES = tuple(
    dict.fromkeys(
        (
            *("torch", *_ENGINES, "transformers", "shardwright"),
            *("peft", "torchao", "flash_attn", "emerging_optimizers", DEEPEP_MODULE),
        )
    )
)
MEASURING_SECONDS = 3.0
MIN_FREE_FRACTION = 0.9
"""Bounds the free share of a GPU's memory, below which another process uses the GPU."""
SHARED_MEMORY = "/dev/shm"
WRITTEN_BY_RUNS = ("run", "checkpoints")
ANSWER_PREFIX = "@shardwright-probe "
"""Before each answer: a host's own greeting may stand on the same output."""


def main() -> int:
    request = msgspec.json.decode(sys.stdin.readline(), type=ProbeRequest)
    os.environ.update(request.environment)
    listener = _listener(request.port)
    folder = Path(request.folder)
    checkpoints = folder / request.checkpoints
    existing = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    if request.cpu:
        devices = len(os.sched_getaffinity(0))
    else:
        import torch

        devices = torch.cuda.device_count()
    # DeepSpeed takes the first address of hostname -I for the master's.
    with os.popen("hostname -I 2>/dev/null") as answer:
        words = answer.read().split()
    _answer(
        host_facts_to_json(
            HostFacts(
                time=time.time(),
                hostname=socket.gethostname(),
                python=platform.python_version(),
                versions={name: installed_version(name) for name in PACKAGES},
                missing_names=tuple(
                    error.message for error in private_name_errors(*request.private_names)
                ),
                digest=digest(folder, request.checkpoints),
                sees_marker=(folder / "run" / request.mark).exists(),
                interfaces=tuple(name for _, name in socket.if_nameindex()),
                address=words[0] if words else None,
                devices=devices,
                busy=() if request.cpu else tuple(_gpus_in_use()),
                free_bytes=shutil.disk_usage(existing).free,
                writable=os.access(existing, os.W_OK | os.X_OK),
                memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
                absent=tuple(path for path in request.inputs if not glob.glob(path)),
                free_port=None if listener is None else listener.getsockname()[1],
                missing_tools=_missing_tools() if request.builds else (),
                stale_build_locks=tuple(map(str, stale_build_locks())) if request.builds else (),
                has_rdma=bool(glob.glob("/sys/class/infiniband/*")),
                locked_memory_bytes=_locked_memory_bytes(),
                shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free
                if os.path.isdir(SHARED_MEMORY)
                else None,
            )
        )
    )
    for line in sys.stdin:
        meeting = msgspec.json.decode(line, type=RendezvousRequest)
        try:
            _answer(rendezvous_result_to_json(_rendezvous(meeting, listener)))
        except Exception as error:  # whatever gloo raises is the answer
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            _answer(rendezvous_result_to_json(RendezvousResult(error=text)))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may wait for peers that are not there
    return 0


def _answer(message: JsonObject) -> None:
    print(ANSWER_PREFIX + json.dumps(message), flush=True)


def _locked_memory_bytes() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _missing_tools() -> tuple[str, ...]:
    """Return which tools of a CPUAdam build are missing. Each one is started, as a broken one is no
    help."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = (
        str(Path(home) / "bin" / "nvcc")
        if home
        else "nvcc"
        if shutil.which("nvcc")
        else "/usr/local/cuda/bin/nvcc"
    )
    beside = str(Path(sys.executable).parent / "ninja")
    tools = {
        "nvcc": (nvcc,),
        "ninja": ("ninja", beside),
        "a C++ compiler": tuple(filter(None, (os.environ.get("CXX"), "c++", "g++"))),
    }
    return tuple(name for name, programs in tools.items() if not any(map(_answers, programs)))


def _answers(program: str) -> bool:
    try:
        return (
            subprocess.run([program, "--version"], capture_output=True, timeout=10).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def digest(folder: Path, checkpoints: str) -> str | None:
    """Hash every compiled file's name and bytes. Returns None where there is no plan."""
    if not (folder / "plan.json").is_file():
        return None
    total = hashlib.sha256()
    roots = [
        path
        for path in folder.iterdir()
        if path.name not in (*WRITTEN_BY_RUNS, checkpoints.split("/")[0])
    ]
    files = [file for root in roots for file in ((root,) if root.is_file() else root.rglob("*"))]
    for path in sorted(
        path for path in files if path.is_file() and "__pycache__" not in path.parts
    ):
        total.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _gpus_in_use() -> list[str]:
    """GPUs that somebody holds memory of, as `nvidia-smi` tells; nothing where it is not there
    (AMD, say)."""
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
    return [
        (
            f"GPU {row[0]} ({row[1]}): {int(row[2]) / 1024:.1f} of {int(row[3]) / 1024:.1f} GiB "
            "are in use"
        )
        for row in rows
        if len(row) == 4
        and row[2].isdigit()
        and row[3].isdigit()
        and int(row[2]) > (1 - MIN_FREE_FRACTION) * int(row[3])
    ]


def _listener(port: int | None) -> socket.socket | None:
    """Return a socket that listens at `port`, or at any free port for None; None where another
    process listens there.

    The socket stays open: no other process can take the port before the hosts meet there.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port or 0), family=family, dualstack_ipv6=dual)
    except OSError:
        return None


def _rendezvous(meeting: RendezvousRequest, listener: socket.socket | None) -> RendezvousResult:
    """A TCP connection to the master's port, then an all-reduce over all hosts, as training would
    open it."""
    from datetime import timedelta

    import torch
    from torch import distributed
    from torch.distributed import TCPStore

    from shardwright.launch.link_bandwidth import measure

    rank, world, limit = meeting.rank, meeting.world, meeting.seconds
    end = time.monotonic() + limit
    if rank and (why := _cannot_connect(meeting.address, meeting.port, limit)):
        return RendezvousResult(unreachable=why)
    left = timedelta(seconds=limit)
    store = TCPStore(
        meeting.address,
        meeting.port,
        world,
        is_master=rank == 0,
        timeout=left,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 and listener else None,
    )
    # One process a host, on its first GPU: the bandwidth of one GPU's share of the network.
    device = torch.device("cpu" if meeting.cpu else "cuda:0")
    backend = "gloo" if meeting.cpu else "nccl"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=left)
    total = torch.ones(1, device=device)
    distributed.all_reduce(total)
    links = measure(
        rank, world, device, min(MEASURING_SECONDS, max(0.0, end - time.monotonic() - 2))
    )
    return RendezvousResult(sum=int(total.item()), links=links)


def _cannot_connect(address: str, port: int, limit: float) -> str | None:
    """Return why the address cannot be reached, None once it can. The listener may start a moment
    later."""
    end = time.monotonic() + limit
    why = ""
    while time.monotonic() < end:
        try:
            with socket.create_connection((address, port), timeout=2):
                return None
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(0.1)
    return why


if __name__ == "__main__":
    raise SystemExit(main())
