"""Two sites on one machine, a network each, and a router between them whose link can be slowed down
and cut.

Needs root and the Debian package iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.launch.hosts import child_of, do, held

NEAR, FAR = "10.78.0", "10.78.1"
_ALONE = ("--net", "--fork", "--kill-child")


def why_not() -> str:
    """Why this machine cannot have such sites; empty where it can."""
    if os.geteuid() != 0:
        return "namespaces with a network need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2"
    tried = subprocess.run(["unshare", *_ALONE, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@dataclass(frozen=True)
class Site:
    """address: that the other one reaches it at. first: a process inside, seen from outside."""

    address: str
    first: int

    def command(self, *arguments: object) -> list[str]:
        """To be run at this site. Its processes and files are this machine's."""
        return ["nsenter", f"--target={self.first}", "--net", *map(str, arguments)]


@dataclass(frozen=True)
class Sites:
    """near, far: a site at each end. router: what forwards between them, by its cards `near` and
    `far`."""

    near: Site
    far: Site
    router: Site

    def slow(self, mbits: float) -> None:
        """Either way, Ethernet headers included, as a token bucket that queues 50 ms of packets."""
        for card in ("near", "far"):
            shape = ["tbf", "rate", f"{mbits}mbit", "burst", "32kb", "latency", "50ms"]
            do(*self.router.command("tc", "qdisc", "replace", "dev", card, "root", *shape))

    def swallow(self) -> None:
        """Packets go in and nothing comes out: no reset, no word of an unreachable host."""
        for site in (self.near, self.far):
            do(*self.router.command("ip", "route", "add", "blackhole", f"{site.address}/32"))

    def spit_out(self) -> None:
        for site in (self.near, self.far):
            do(*self.router.command("ip", "route", "del", "blackhole", f"{site.address}/32"))

    def set_link(self, state: str) -> None:
        """state: up | down, of the far site's link."""
        do(*self.router.command("ip", "link", "set", "far", state))

    def carried(self) -> int:
        """Bytes that have come from the far site."""
        told = subprocess.run(
            self.router.command("ip", "-s", "-j", "link", "show", "far"), capture_output=True
        )
        return int(json.loads(told.stdout)[0]["stats64"]["rx"]["bytes"])

    def reset(self) -> None:
        """As it was made."""
        for words in (
            *(("tc", "qdisc", "del", "dev", card, "root") for card in ("near", "far")),
            *(
                ("ip", "route", "del", "blackhole", f"{site.address}/32")
                for site in (self.near, self.far)
            ),
            ("ip", "link", "set", "far", "up"),
        ):
            subprocess.run(self.router.command(*words), capture_output=True)


@contextlib.contextmanager
def sites() -> Iterator[Sites]:
    with contextlib.ExitStack() as stack:
        near, far, router = (
            Site(
                address=address,
                first=child_of(
                    stack.enter_context(held(["unshare", *_ALONE, "sleep", "infinity"]))
                ),
            )
            for address in (f"{NEAR}.1", f"{FAR}.1", f"{NEAR}.2")
        )
        for site in (near, far, router):
            do(*site.command("ip", "link", "set", "lo", "up"))
        for name, site, network in (("near", near, NEAR), ("far", far, FAR)):
            ends = [
                "ip",
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(site.first),
            ]
            do(*router.command(*ends))
            do(*router.command("ip", "addr", "add", f"{network}.2/24", "dev", name))
            do(*router.command("ip", "link", "set", name, "up"))
            do(*site.command("ip", "addr", "add", f"{network}.1/24", "dev", "eth0"))
            do(*site.command("ip", "link", "set", "eth0", "up"))
            do(*site.command("ip", "route", "add", "default", "via", f"{network}.2"))
        do(*router.command("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
        for site in (
            near,
            far,
        ):  # of the kernel's ways the one that is always there; a machine's own may be any
            do(*site.command("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"))
        yield Sites(near, far, router)
