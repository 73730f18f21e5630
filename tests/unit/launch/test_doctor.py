"""What `doctor` says of the facts that the hosts answer with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compile import compile_recipe
from shardwright.launch.extension_build_locks import compiles_optimizer
from shardwright.launch.host_checks import Examined, _builds, _memory
from shardwright.launch.probe_messages import (
    HostFacts,
    LinkRates,
    Met,
    facts_object,
    message_of,
    met_object,
    met_of,
)
from shardwright.launch.remote_probe import ProbedHost
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe())).plan


@pytest.mark.parametrize(("offload", "element"), [("optimizer", 16), ("parameters", 18)])
def test_offloaded_states_need_what_the_compiler_says(
    offload: str, element: int, plan: Plan, tmp_path: Path
) -> None:
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, offload=offload))
    needed = element * plan.model.total_parameters / plan.nodes

    def codes(memory_bytes: float) -> list[str]:
        there = ProbedHost(host="a", facts=HostFacts(memory_bytes=int(memory_bytes)))
        x = Examined(plan=plan, folder=tmp_path, shared=True, answers=(there,), digest=None)
        return [problem.code for problem in _memory(x).problems]

    assert codes(needed / 0.89) == [] and codes(needed / 0.91) == ["SW5310"]


def test_what_a_probe_says_comes_back() -> None:
    facts = HostFacts(
        hostname="a", versions={"torch": "2.9", "peft": None}, interfaces=("lo",), devices=2
    )
    assert message_of(HostFacts, json.loads(json.dumps(facts_object(facts)))) == facts
    links = LinkRates(to_next=1e9, local=None)
    for met, wire in (
        (Met(unreachable="refused"), {"kind": "met", "unreachable": "refused"}),
        (Met(error="gloo"), {"kind": "met", "error": "gloo"}),
        (
            Met(sum=2, links=links),
            {"kind": "met", "sum": 2, "links": {"to_next": 1e9, "all_reduce": None, "local": None}},
        ),
    ):
        assert met_object(met) == wire and met_of(wire) == met
    assert message_of(HostFacts, {"kind": "facts", "devices": 1, "of_later": 2}) == HostFacts(
        devices=1
    )


def test_what_deepspeed_compiles_can_be_compiled(plan: Plan, tmp_path: Path) -> None:
    facts = HostFacts(no_tools=("nvcc",), stale_locks=("/c/cpu_adam/lock",))
    examined = Examined(
        plan=plan,
        folder=tmp_path,
        digest="",
        shared=True,
        answers=(ProbedHost(host="a", facts=facts),),
    )
    first, second = _builds(examined).problems
    assert first.code == "SW5317" and "a: nvcc is missing" in first.message
    assert second.code == "SW5318" and "rm /c/cpu_adam/lock" in str(second.help)
    assert not compiles_optimizer(plan)
