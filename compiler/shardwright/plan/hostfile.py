"""Read a hostfile and check it against the plan's nodes and ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, Location, Refusal, found

SHELL_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./^-]*")
"""Matches text that DeepSpeed's multi-node launchers pass on unchanged. pdsh hands it to a
remote shell unquoted; the others leave DeepSpeed's added quotes in place
(launcher/multinode_runner.py)."""

# DeepSpeed's own pattern (launcher/runner.py) ignores any text after the slots. Open MPI's files
# have max_slots there; the ranks of a host are its slots.
_HOST_LINE = re.compile(
    r"((?:{name}@)?{name})\s+slots=([0-9]{{1,6}})(?:\s+max[_-]slots=[0-9]{{1,6}})?(?:\s+\#.*)?".format(
        name=r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
    )
)
_COLON = re.compile(r"([^\s:]+):([^\s:]*)(:\S*)?\s+slots=[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Hold one host; place: its line of the hostfile."""

    name: str
    slots: int
    place: Location


def read_hostfile(
    path: str, text: str, nodes: int, gpus_per_node: int, spares: int = 0
) -> tuple[Host, ...]:
    """Return the hosts in order: host i is the plan's node i. At most `spares` more may follow.

    Rank r of a plan is on slot r % gpus_per_node of node r // gpus_per_node. DeepSpeed numbers
    ranks through the hosts' slots, so another number of slots would shift every later rank and move
    tensor groups across nodes.

    Raises Refusal with SW5201 to SW5203 for every wrong line.
    """
    by_name: dict[str, Host] = {}
    errors: list[Diagnostic] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        place = Location(file=path, line=number, column=1, length=max(1, len(line.rstrip())))
        match = _HOST_LINE.fullmatch(stripped)
        if match is None:
            errors.append(_unreadable(number, stripped, place))
        elif match[1] in by_name:
            errors.append(
                found(
                    "SW5202",
                    place,
                    (
                        f"hostfile line {number}: {match[1]!r} is already listed on line "
                        f"{by_name[match[1]].place.line}"
                    ),
                    "List each host once; slots=N is the number of its GPUs.",
                )
            )
        else:
            by_name[match[1]] = Host(name=match[1], slots=int(match[2]), place=place)
    hosts = tuple(by_name.values())
    errors += [
        found(
            "SW5203",
            host.place,
            f"hostfile line {host.place.line}: {host.name} has slots={host.slots}, but the plan "
            f"has {gpus_per_node} ranks on each node",
            _clusters(hosts),
        )
        for host in hosts
        if host.slots != gpus_per_node
    ]
    if not errors and not nodes <= len(hosts) <= nodes + spares:
        surplus = hosts[nodes + spares].place if len(hosts) > nodes + spares else None
        at = f" line {surplus.line}" if surplus else ""
        errors.append(
            found(
                "SW5203",
                surplus or Location(file=path, line=0, column=0),
                (
                    f"hostfile{at}: {_count(len(hosts), 'host')}, but the plan has "
                    f"{_count(nodes, 'node')}"
                    + (f" and {_count(spares, 'spare host')}" if spares else "")
                ),
                f"Write {_count(nodes, 'line')} `name slots={gpus_per_node}`, or compile for "
                f"cluster.nodes: {max(1, len(hosts))}.",
            )
        )
    if errors:
        raise Refusal(*errors)
    return hosts


def _clusters(hosts: tuple[Host, ...]) -> str:
    """Name the clusters that these hosts can form, the one with the most GPUs first."""
    by_slots = {
        slots: sum(host.slots >= slots for host in hosts)
        for slots in {host.slots for host in hosts}
        if slots
    }
    sizes = sorted(by_slots.items(), key=lambda item: (-item[0] * item[1], -item[0]))[:3]
    if not sizes:
        return "Write slots=N, the number of the host's GPUs."
    named = " or ".join(
        f"nodes: {count}, gpus_per_node: {slots} ({slots * count} GPUs)" for slots, count in sizes
    )
    if len(by_slots) == 1:
        return f"Compile for cluster.{named}."
    return (
        f"Compile for cluster.{named}. Lower a host's slots below its GPUs, or remove hosts, "
        "to match."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _unreadable(number: int, line: str, place: Location) -> Diagnostic:
    colon = _COLON.fullmatch(line)
    message = f"hostfile line {number}: {line!r} is not `name slots=N`"
    help = "Write one host a line: its name, a space and slots=N; a comment begins with #."
    if colon is not None and colon[3] is None and colon[2].isdecimal():
        message = f"hostfile line {number}: '{colon[1]}:{colon[2]}' is a host name with a port"
        name = colon[1].rpartition("@")[2]
        help = (
            f"Write `{colon[1]}` here, and the port in ~/.ssh/config: `Host {name}` and below "
            f"it `Port {colon[2]}`."
        )
    elif colon is not None:  # pdsh reads the text before a colon as the way to log in
        message = f"hostfile line {number}: the host name contains a colon"
        help = (
            "Give a host with an IPv6 address a name, in DNS, /etc/hosts or ~/.ssh/config, and "
            "write that."
        )
    return found("SW5201", place, message, help)
