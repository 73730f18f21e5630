"""What `doctor` runs on each host: says what is there, then meets the other hosts. No torch before
it has spoken.

Reads one JSON object a line on standard input, answers with one a line: first the facts, then,
where asked for, how the meeting went.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from shardwright.engines.engine_table import ENGINES
from shardwright.launch import probe_messages
from shardwright.launch.extension_build_locks import stale_build_locks
from shardwright.utils.json_types import JsonObject

_ENGINES = (name for engine in ENGINES.values() for name in engine.packages)
PACKAGES = tuple(
    dict.fromkeys(("torch", *_ENGINES, "transformers", "shardwright", "peft", "flash_attn"))
)
MEASURING_SECONDS = 3.0
MIN_FREE_FRACTION = 0.9
"""Of a GPU's memory: what less is free of, somebody else holds."""
WRITTEN_BY_RUNS = ("run", "checkpoints")
ANSWER_PREFIX = "@shardwright-probe "
"""Before each answer: a host's own greeting may stand on the same output."""


def main() -> int:
    request = probe_messages.message_from_json(
        probe_messages.ProbeRequest, json.loads(sys.stdin.readline())
    )
    os.environ.update(request.environment)
    _answer(probe_messages.host_facts_to_json(_facts(request)))
    for line in sys.stdin:
        meeting = probe_messages.message_from_json(
            probe_messages.RendezvousRequest, json.loads(line)
        )
        try:
            _answer(probe_messages.rendezvous_result_to_json(_rendezvous(meeting)))
        except Exception as error:  # whatever gloo raises is the answer
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            _answer(
                probe_messages.rendezvous_result_to_json(
                    probe_messages.RendezvousResult(error=text)
                )
            )
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may wait for peers that are not there
    return 0


def _answer(message: JsonObject) -> None:
    print(ANSWER_PREFIX + json.dumps(message), flush=True)


def _facts(request: probe_messages.ProbeRequest) -> probe_messages.HostFacts:
    folder = Path(request.folder)
    checkpoints = folder / request.checkpoints
    return probe_messages.HostFacts(
        time=time.time(),
        hostname=socket.gethostname(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        digest=digest(folder, request.checkpoints),
        sees_marker=(folder / "run" / request.mark).exists(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        address=_first_address(),
        devices=_devices(cpu=request.cpu),
        busy=() if request.cpu else tuple(_gpus_in_use()),
        free_bytes=_free_bytes(checkpoints),
        writable=_writable(checkpoints),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        absent=tuple(path for path in request.inputs if not glob.glob(path)),
        free_port=_free_port(request.port),
        missing_tools=_missing_tools() if request.builds else (),
        stale_build_locks=tuple(map(str, stale_build_locks())) if request.builds else (),
    )


def _missing_tools() -> tuple[str, ...]:
    """What DeepSpeed compiles CPUAdam with: each is started, as a broken one is no help."""
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest(folder: Path, checkpoints: str) -> str | None:
    """Of every compiled file's name and bytes; None where there is no plan."""
    if not (folder / "plan.json").is_file():
        return None
    total = hashlib.sha256()
    for path in _compiled_files(folder, (*WRITTEN_BY_RUNS, checkpoints.split("/")[0])):
        total.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _compiled_files(folder: Path, left_out: Iterable[str]) -> list[Path]:
    roots = [path for path in folder.iterdir() if path.name not in left_out]
    files = [file for root in roots for file in ((root,) if root.is_file() else root.rglob("*"))]
    return sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)


def _first_address() -> str | None:
    """What DeepSpeed takes for the master's address: the first of `hostname -I`."""
    with os.popen("hostname -I 2>/dev/null") as answer:
        words = answer.read().split()
    return words[0] if words else None


def _devices(*, cpu: bool) -> int:
    if cpu:
        return len(os.sched_getaffinity(0))
    import torch

    return torch.cuda.device_count()


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


def _nearest(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(_nearest(path)).free


def _writable(path: Path) -> bool:
    return os.access(_nearest(path), os.W_OK | os.X_OK)


def _free_port(port: int | None) -> int | None:
    """`port` if nothing listens there, any free one where none is asked for, else None."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port or 0))
        except OSError:
            return None
        return int(s.getsockname()[1])


def _rendezvous(meeting: probe_messages.RendezvousRequest) -> probe_messages.RendezvousResult:
    """A TCP connection to the master's port, then an all-reduce over all hosts, as training would
    open it."""
    from datetime import timedelta

    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from shardwright.launch.link_bandwidth import measure

    rank, world, limit = meeting.rank, meeting.world, meeting.seconds
    end = time.monotonic() + limit
    if rank and (why := _cannot_connect(meeting.address, meeting.port, limit)):
        return probe_messages.RendezvousResult(unreachable=why)
    left = timedelta(seconds=limit)
    store = TCPStore(
        meeting.address,
        meeting.port,
        world,
        is_master=rank == 0,
        timeout=left,
        wait_for_workers=False,
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
    return probe_messages.RendezvousResult(sum=int(total.item()), links=links)


def _cannot_connect(address: str, port: int, limit: float) -> str | None:
    """Why there is no connection; the listener may need a moment to be there."""
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
