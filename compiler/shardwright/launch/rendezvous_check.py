"""The hosts of a run meet, as training would: at the master's address, in an all-reduce; their
links are measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, found
from shardwright.diagnostics.host_check import MIN_BANDWIDTH_FRACTION, HostCheck, red
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.launch.probe_messages import RendezvousRequest
from shardwright.launch.remote_probe import Probe, ProbedHost
from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBandwidth:
    """What the plan was made with, per GPU and one way; nothing is held against a CPU's links."""

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
        text = f"{first.host}: something listens on port {plan.launch.master_port} already"
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
                "Set launch.master_addr to an address of the first host that all reach, and open "
                "the ports between them."
            ),
        )
        for probed in met
        if probed.met.unreachable is not None
    ]
    port_check = HostCheck(
        name="rendezvous", told=f"{address}:{port} is free and all reach it", problems=tuple(apart)
    )
    wrong = [p for p in met if not apart and p.met.sum != len(probes)]
    among = (
        "all hosts"
        if whole
        else ", ".join(p.result.host for p in probes) + " only, the others are not able to"
    )
    summed = tuple(
        red(
            "SW5309",
            f"{probed.host}: the all-reduce failed: {probed.met.error or probed.problem}",
            (
                "Set launch.env.GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs) to the card that "
                "the hosts share."
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
        told.append(f"{_gbits(between[0])} Gb/s between hosts ({between[1]} is the slowest)")
        if not assumed.is_cpu:
            told[-1] += f", {_gbits(assumed.inter_node_bytes_per_second)} planned"
            if between[0] < MIN_BANDWIDTH_FRACTION * assumed.inter_node_bytes_per_second:
                key = f"cluster.inter_node_gbits_per_second={_gbits(between[0])}"
                problems.append(
                    _slow(between[1], between[0], assumed.inter_node_bytes_per_second, key)
                )
    if summed:
        told.append(f"{_gbits(summed)} Gb/s a host in an all-reduce")
    if inside:
        planned = assumed.intra_node_bytes_per_second
        told.append(
            f"{inside[0] / 1e9:.0f} GB/s between GPUs ({inside[1]}), {planned / 1e9:.0f} planned"
        )
        if inside[0] < MIN_BANDWIDTH_FRACTION * planned:
            key = f"cluster.intra_node_gbytes_per_second={inside[0] / 1e9:.0f}"
            problems.append(_slow(f"GPU 0 -> GPU 1 of {inside[1]}", inside[0], planned, key))
    return HostCheck(
        name="links", told="; ".join(told) or "one host, one device: none", problems=tuple(problems)
    )


def _slow(where: str, rate: float, planned: float, key: str) -> Diagnostic:
    message = f"{where}: {_gbits(rate)} Gb/s, the plan assumes {_gbits(planned)}"
    help = (
        f"If this is what the cluster gives, compile again with --set {key}: another layout may be "
        "faster. Else look at the card that NCCL takes (NCCL_DEBUG=INFO) and at who else uses the "
        "network."
    )
    return found("SW5312", None, message, help, severity="warning")


def _gbits(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e9:.3g}"
