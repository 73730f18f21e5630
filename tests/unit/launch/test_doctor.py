"""What `doctor` says of the facts that the hosts answer with."""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.launch.host_checks import (
    HostCheckInput,
    _build_tools,
    _interfaces,
    _limits,
    _memory,
    _versions,
)
from shardwright.launch.host_probe import (
    HostFacts,
    LinkRates,
    Probe,
    ProbedHost,
    ProbeRequest,
    RendezvousRequest,
    RendezvousResult,
    host_facts_to_json,
    rendezvous_result_to_json,
)
from shardwright.launch.preflight_checks import compiles_cpu_adam
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import Offload
from shardwright.recipe.recipe_loader import load_recipe


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe())).plan


@pytest.mark.parametrize(("offload", "element"), [("optimizer", 16), ("parameters", 18)])
def test_offloaded_states_need_what_the_compiler_says(
    offload: Offload, element: int, plan: Plan, tmp_path: Path
) -> None:
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, offload=offload))
    needed = element * plan.model.total_parameters / plan.nodes

    def codes(memory_bytes: float) -> list[str]:
        there = ProbedHost(host="a", facts=HostFacts(memory_bytes=int(memory_bytes)))
        x = HostCheckInput(plan=plan, folder=tmp_path, shared=True, answers=(there,), digest=None)
        return [problem.code for problem in _memory(x).problems]

    assert codes(needed / 0.89) == [] and codes(needed / 0.91) == ["SW5310"]


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0,ib0", []),
        ("NCCL_SOCKET_IFNAME", "ib0,eth", []),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", []),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", []),
        ("NCCL_SOCKET_IFNAME", "=eth", ["=eth"]),
        ("NCCL_SOCKET_IFNAME", "ens,ib0", ["ens,ib0"]),
        ("NCCL_SOCKET_IFNAME", "^eth,lo,docker", ["^eth,lo,docker"]),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", ["ib0"]),
        ("GLOO_SOCKET_IFNAME", "eth", ["eth"]),
    ],
)
def test_nccl_takes_any_interface_of_its_list(
    plan: Plan, tmp_path: Path, variable: str, value: str, missing: list[str]
) -> None:
    pinned = dataclasses.replace(
        plan, launch=dataclasses.replace(plan.launch, env=((variable, value),))
    )
    facts = HostFacts(interfaces=("lo", "docker0", "eth0"))
    there = ProbedHost(host="a", facts=facts)
    x = HostCheckInput(plan=pinned, folder=tmp_path, shared=True, answers=(there,), digest=None)
    found = _interfaces(x).problems
    assert [p.code for p in found] == ["SW5307"] * len(missing)
    assert all(
        f"a: {variable}={name}, but" in p.message for p, name in zip(found, missing, strict=True)
    )


def test_a_host_whose_package_lacks_a_private_name_is_red(plan: Plan, tmp_path: Path) -> None:
    lacking = "transformers 6.0 has no masking_utils._mask, which context parallelism needs"
    hosts = [HostFacts(), HostFacts(missing_names=(lacking,))]
    there = tuple(
        ProbedHost(
            host=name,
            facts=dataclasses.replace(
                facts, versions=plan.versions, python=platform.python_version()
            ),
        )
        for name, facts in zip("ab", hosts, strict=True)
    )
    x = HostCheckInput(plan=plan, folder=tmp_path, shared=True, answers=there, digest=None)
    (problem,) = _versions(x).problems
    assert (problem.code, problem.message) == ("SW1926", f"b: {lacking}")


def test_what_a_probe_says_comes_back() -> None:
    facts = HostFacts(
        hostname="a", versions={"torch": "2.9", "peft": None}, interfaces=("lo",), devices=2
    )
    assert msgspec.convert(json.loads(json.dumps(host_facts_to_json(facts))), HostFacts) == facts
    links = LinkRates(to_next=1e9, local=None)
    for met, wire in (
        (RendezvousResult(unreachable="refused"), {"kind": "met", "unreachable": "refused"}),
        (RendezvousResult(error="gloo"), {"kind": "met", "error": "gloo"}),
        (
            RendezvousResult(sum=2, links=links),
            {"kind": "met", "sum": 2, "links": {"to_next": 1e9, "all_reduce": None, "local": None}},
        ),
    ):
        assert (
            rendezvous_result_to_json(met) == wire
            and msgspec.convert(wire, RendezvousResult) == met
        )
    later = {"kind": "facts", "devices": 1, "of_later": 2}
    assert msgspec.convert(later, HostFacts) == HostFacts(devices=1)


def test_what_deepspeed_compiles_can_be_compiled(plan: Plan, tmp_path: Path) -> None:
    facts = HostFacts(missing_tools=("nvcc",), stale_build_locks=("/c/cpu_adam/lock",))
    examined = HostCheckInput(
        plan=plan,
        folder=tmp_path,
        digest="",
        shared=True,
        answers=(ProbedHost(host="a", facts=facts),),
    )
    first, second = _build_tools(examined).problems
    assert first.code == "SW5317" and "a: nvcc is missing" in first.message
    assert second.code == "SW5318" and "rm /c/cpu_adam/lock" in str(second.help)
    assert not compiles_cpu_adam(plan)


def test_limits_of_memory_that_ranks_lock_and_share(plan: Plan, tmp_path: Path) -> None:
    on_gpus = dataclasses.replace(plan, is_cpu=False, nodes=2, gpus_per_node=8)

    def codes(plan: Plan, **facts: Any) -> list[tuple[str, str]]:
        there = ProbedHost(host="a", facts=HostFacts(**facts))
        x = HostCheckInput(plan=plan, folder=tmp_path, shared=True, answers=(there,), digest=None)
        return [(problem.code, problem.severity) for problem in _limits(x).problems]

    low: dict[str, Any] = {
        "has_rdma": True,
        "locked_memory_bytes": 8 * 2**20,
        "shared_memory_bytes": 64 * 2**20,
    }
    assert codes(on_gpus, **low) == [("SW5319", "warning"), ("SW5320", "warning")]
    assert codes(on_gpus, **{**low, "has_rdma": False}) == [("SW5320", "warning")]
    assert codes(on_gpus, has_rdma=True, shared_memory_bytes=2**33) == []
    one = dataclasses.replace(on_gpus, nodes=1, gpus_per_node=1)
    assert codes(one, **low) == [] and codes(on_gpus) == []


def test_the_port_of_a_rendezvous_is_held_until_the_hosts_meet(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        taken = started_probe(tmp_path, other.getsockname()[1])
        try:
            taken.wait("facts", time.monotonic() + 60)
            assert taken.result.received and taken.result.facts.free_port is None
        finally:
            taken.close()
    probe = started_probe(tmp_path, None)
    try:
        probe.wait("facts", time.monotonic() + 60)
        port = probe.result.facts.free_port
        assert port is not None
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port))
        pytest.importorskip("torch")  # whose store the hosts meet at
        probe.ask(
            RendezvousRequest(rank=0, world=1, address="127.0.0.1", port=port, seconds=30, cpu=True)
        )
        probe.wait("met", time.monotonic() + 60)
        assert probe.result.met.sum == 1, probe.result
    finally:
        probe.close()


def started_probe(folder: Path, port: int | None) -> Probe:
    probe = Probe("here", reach="local")
    probe.ask(
        ProbeRequest(
            folder=str(folder),
            checkpoints="checkpoints",
            mark="m",
            cpu=True,
            inputs=(),
            port=port,
            environment={},
        )
    )
    return probe


def test_a_host_tells_its_limits(tmp_path: Path, plan: Plan) -> None:
    probe = started_probe(tmp_path, None)
    try:
        probe.wait("facts", time.monotonic() + 60)
        facts = probe.result.facts
    finally:
        probe.close()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert facts.locked_memory_bytes == (None if limit == resource.RLIM_INFINITY else limit)
    assert facts.shared_memory_bytes is not None and facts.shared_memory_bytes > 0
