"""Hosts of one's own on one machine: each a network, process, mount and name namespace with an
sshd, on one switch.

Needs root and the Debian packages openssh-server, pdsh and iproute2 (`make test-hosts` installs
them).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
SSHD = "/usr/sbin/sshd"
NETWORK = "10.77.0"


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0:
        return "namespaces with an sshd need root"
    missing = [
        tool
        for tool in ("ip", "pdsh", "ssh", "ssh-keygen", "unshare", "nsenter")
        if not shutil.which(tool)
    ]
    missing += [] if Path(SSHD).exists() else ["sshd"]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install openssh-server pdsh iproute2"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True
    )
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


@dataclass
class Host:
    """name: what the others call it; init: its first process (sshd), seen from outside."""

    name: str
    address: str
    init: int
    keeper: subprocess.Popen[bytes]

    def command(self, *arguments: object) -> list[str]:
        """To be run on this host."""
        return [
            "nsenter",
            f"--target={self.init}",
            "--net",
            "--pid",
            "--mount",
            "--uts",
            *map(str, arguments),
        ]

    def run(self, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=timeout
        )

    def must(self, *arguments: object) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{self.name}: {arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def processes(self) -> list[str]:
        """Command lines of all that runs here but sshd itself and this listing."""
        listed = self.must("ps", "-eo", "pid=,args=").splitlines()
        return [line.strip() for line in listed if "sshd" not in line and "ps -eo" not in line]

    def overlay(self, folder: Path) -> None:
        """Let what this host changes in `folder` be seen on this host alone."""
        upper, work = "/run/overlay/upper", "/run/overlay/work"
        self.must("mkdir", "-p", upper, work)
        layers = f"lowerdir={folder},upperdir={upper},workdir={work}"
        self.must("mount", "-t", "overlay", "overlay", "-o", layers, folder)


@contextlib.contextmanager
def hosts(count: int, folder: Path, interfaces: tuple[str, ...] = ()) -> Iterator[list[Host]]:
    """`count` hosts a, b, c... in one network. interfaces: names of their network cards, where not
    eth0."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [chr(ord("a") + i) for i in range(count)]
    _write_ssh_files(folder, names)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(
            held(["unshare", "--net", "--kill-child", "--fork", "sleep", "infinity"])
        )
        inside = ["nsenter", f"--target={child_of(switch)}", "--net"]
        do(*inside, "ip", "link", "add", "switch", "type", "bridge")
        do(*inside, "ip", "link", "set", "switch", "up")
        made = []
        for i, name in enumerate(names):
            keeper = stack.enter_context(held(_host_command(folder, name)))
            host = Host(
                name=name, address=f"{NETWORK}.{i + 1}", init=child_of(keeper), keeper=keeper
            )
            card = interfaces[i] if interfaces else INTERFACE
            port = f"port{i}"
            do(
                *inside,
                "ip",
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                card,
                "netns",
                str(host.init),
            )
            do(*inside, "ip", "link", "set", port, "master", "switch", "up")
            for step in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{host.address}/24", "dev", card),
                ("link", "set", card, "up"),
            ):
                host.must("ip", *step)
            made.append(host)
        for host in made:
            _await_sshd(made[0], host)
        yield made


def _host_command(folder: Path, name: str) -> list[str]:
    """One shell line in fresh namespaces that ends as sshd, the host's first process."""
    setup = (
        f"hostname {name} && mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir "
        f"/run/sshd && mount --bind {folder}/hosts /etc/hosts && mount --bind {folder}/ssh_config "
        f"/etc/ssh/ssh_config && while ! ip -br addr | grep -q {NETWORK}; do sleep 0.05; done; "
        f"exec {SSHD} -D -e -f {folder}/sshd_config 2>>{folder}/sshd-{name}.log"
    )
    namespaces = [
        "--net",
        "--pid",
        "--mount",
        "--uts",
        "--ipc",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    return ["unshare", *namespaces, "bash", "-c", setup]


def _write_ssh_files(folder: Path, names: list[str]) -> None:
    for key in ("host_key", "user_key"):
        do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    addresses = "".join(f"{NETWORK}.{i + 1} {name}\n" for i, name in enumerate(names))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile "
        f"{folder}/authorized_keys\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  "
        "StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (folder / "user_key").chmod(0o600)


@contextlib.contextmanager
def held(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Alive inside the block; the namespaces go with it."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The process that `unshare --fork` made: the first one inside."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 20
    while not (children := path.read_text().split()):
        assert process.poll() is None, f"{process.args!r} ended"
        assert time.monotonic() < end, f"{process.args!r} started nothing"
        time.sleep(0.02)
    return int(children[0])


def _await_sshd(first: Host, host: Host) -> None:
    end = time.monotonic() + 30
    while (tried := first.run("ssh", "-o", "ConnectTimeout=2", host.name, "true")).returncode:
        assert time.monotonic() < end, f"no ssh to {host.name}: {tried.stderr}"
        time.sleep(0.1)


def do(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
