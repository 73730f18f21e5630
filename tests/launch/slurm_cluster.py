"""A Slurm cluster of two nodes on this machine: the real slurmctld, slurmd and munged, in a folder
of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.utils.child_processes import free_port

NODES = (socket.gethostname(), "zzz")
"""In Slurm's order. The first is where the ranks meet, so its name must lead somewhere."""
SPARE = "zzzz"
"""A node that a job may leave out."""
DEAD_AFTER = 15
"""Seconds without an answer after which Slurm takes a node for dead (300 where nothing is set)."""
DEAD_AFTER_CHECK = 90
"""The same, for tests of what finds out that a node is lost before Slurm does."""

CONF = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={dead_after}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cores} "
    "Feature=fast State=UNKNOWN\n"
)


def why_not() -> str:
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged", "sbatch")
        if shutil.which(name, path=_path()) is None
    ]
    if missing:
        return f"no {', '.join(missing)} here: make test-hosts installs them"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@contextlib.contextmanager
def slurm(
    folder: Path, *, spare: bool = False, dead_after: int = DEAD_AFTER
) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and the other commands find the cluster. Its processes end
    with the block.

    spare: with a third node.
    """
    names = (*NODES, SPARE) if spare else NODES
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    nodes = "".join(
        NODE.format(name=name, port=free_port(), cores=os.cpu_count()) for name in names
    )
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, port=free_port(), dead_after=dead_after) + nodes
    )
    env = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    files = {
        "socket": "socket",
        "key-file": "key",
        "pid-file": "pid",
        "log-file": "log",
        "seed-file": "seed",
    }
    munge = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-i"]]
    commands += [["slurmd", "-D", "-N", name] for name in names]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}-{len(started)}.out").open("wb") as out:
                started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            if command[0] == "munged":
                wait_for(lambda: (folder / "munge.socket").exists(), 20)
        wait_for(lambda: output(env, "sinfo", "--noheader", "--format=%T").split() == ["idle"], 60)
        yield env
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            output(env, "scancel", "--full", "--user=root")
            wait_for(lambda: not output(env, "squeue", "--noheader").strip(), 60)
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=30)


def lose_node(name: str) -> None:
    """Kill a node's slurmd, then the steps on it, then their processes, as a power cut does: none
    tells Slurm's controller of another's end."""
    daemons, steps, ranks = set[int](), set[int](), set[int]()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if Path(os.fsdecode(words[0])).name == "slurmd" and name.encode() in words:
                daemons.add(int(place.name))
            if f"SLURMD_NODENAME={name}".encode() in (place / "environ").read_bytes().split(b"\0"):
                ranks.add(int(place.name))
                parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
                if b"slurmstepd" in Path("/proc", parent, "cmdline").read_bytes():
                    steps.add(int(parent))
    for pid in (*daemons, *steps, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def output(env: dict[str, str], *command: str) -> str:
    """ "" where the command fails: the controller may not be up yet."""
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout


def state(env: dict[str, str], job: str) -> dict[str, str]:
    """What scontrol says of a job: JobState, RestartCnt, ..."""
    words = output(env, "scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.5)
