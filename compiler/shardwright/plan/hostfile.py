"""The hosts of a run, which a hostfile binds to the plan's node indices: its lines, and do they fit
the rank map?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, Location, Refusal, found

SHELL_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")
"""What DeepSpeed's multi-node launchers pass on as it is: pdsh hands it to a remote shell unquoted,
and for the others DeepSpeed puts quotes around the rest that nobody takes off
(launcher/multinode_runner.py)."""

# DeepSpeed's own pattern (launcher/runner.py) also accepts text after the slots; that text would be
# ignored in silence.
_HOST_LINE = re.compile(
    r"((?:{name}@)?{name})\s+slots=([0-9]{{1,6}})".format(name=r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
)
_COLON = re.compile(r"([^\s:]+):([^\s:]*)(:\S*)?\s+slots=[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """place: its line of the hostfile."""

    name: str
    slots: int
    place: Location


def read_hostfile(path: str, text: str, nodes: int, gpus_per_node: int) -> tuple[Host, ...]:
    """The hosts of a hostfile in order: host i is the plan's node i. Raises Refusal with every line
    that is wrong.

    Rank r of a plan is on slot r % gpus_per_node of node r // gpus_per_node, and DeepSpeed numbers
    ranks through the hosts' slots: other slots would move every later rank, and tensor groups would
    leave their node.
    """
    hosts, errors = _parse(path, text)
    errors += [
        found(
            "SW5203",
            host.place,
            f"hostfile line {host.place.line}: {host.name} has slots={host.slots}, the plan has "
            f"{gpus_per_node} ranks on each node",
            _clusters(hosts),
        )
        for host in hosts
        if host.slots != gpus_per_node
    ]
    if not errors and len(hosts) != nodes:
        surplus = hosts[nodes].place if len(hosts) > nodes else None
        at = f" line {surplus.line}" if surplus else ""
        errors.append(
            found(
                "SW5203",
                surplus or Location(file=path, line=0, column=0),
                (
                    f"hostfile{at}: {_count(len(hosts), 'host')}, and the plan has "
                    f"{_count(nodes, 'node')}"
                ),
                f"Give {_count(nodes, 'line')} `name slots={gpus_per_node}`, or compile for "
                f"cluster.nodes: {max(1, len(hosts))}.",
            )
        )
    if errors:
        raise Refusal(*errors)
    return hosts


def _clusters(hosts: tuple[Host, ...]) -> str:
    """The clusters that can be made of these hosts, the one with the most GPUs first: every node
    has as many slots."""
    by_slots = {
        slots: sum(host.slots >= slots for host in hosts)
        for slots in {host.slots for host in hosts}
        if slots
    }
    sizes = sorted(by_slots.items(), key=lambda item: (-item[0] * item[1], -item[0]))[:3]
    if not sizes:
        return "Write slots=N, the number of the host's GPUs."
    told = [
        f"nodes: {count}, gpus_per_node: {slots} ({slots * count} GPUs)" for slots, count in sizes
    ]
    named = " or ".join(told)
    if len(by_slots) == 1:
        return f"Compile for cluster.{named}."
    return (
        f"Compile for cluster.{named}; a host may offer fewer slots than it has GPUs, and "
        "others stay out."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parse(path: str, text: str) -> tuple[tuple[Host, ...], list[Diagnostic]]:
    hosts: dict[str, Host] = {}
    errors: list[Diagnostic] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        place = Location(file=path, line=number, column=1, length=max(1, len(line.rstrip())))
        match = _HOST_LINE.fullmatch(stripped)
        if match is None:
            errors.append(_unreadable(number, stripped, place))
        elif match[1] in hosts:
            errors.append(
                found(
                    "SW5202",
                    place,
                    (
                        f"hostfile line {number}: {match[1]!r} is there already, on line "
                        f"{hosts[match[1]].place.line}"
                    ),
                    "Give each host one line; slots=N is the number of its GPUs.",
                )
            )
        else:
            hosts[match[1]] = Host(name=match[1], slots=int(match[2]), place=place)
    return tuple(hosts.values()), errors


def _unreadable(number: int, line: str, place: Location) -> Diagnostic:
    colon = _COLON.fullmatch(line)
    message = f"hostfile line {number}: {line!r} is not `name slots=N`"
    help = "One host a line: its name, a space and slots=N; comments on lines of their own."
    if colon is not None and colon[3] is None and colon[2].isdecimal():
        message = (
            f"hostfile line {number}: '{colon[1]}:{colon[2]}' is not a host's name: it has a port "
            "behind it"
        )
        name = colon[1].rpartition("@")[2]
        help = (
            f"Write `{colon[1]}` here, and the port in ~/.ssh/config: `Host {name}` and below "
            f"it `Port {colon[2]}`."
        )
    elif colon is not None:  # pdsh reads what stands before a colon as the way to log in
        message = f"hostfile line {number}: a host's name has no colon in it"
        help = (
            "Give a host with an IPv6 address a name, in DNS, /etc/hosts or ~/.ssh/config, and "
            "write that."
        )
    return found("SW5201", place, message, help)
