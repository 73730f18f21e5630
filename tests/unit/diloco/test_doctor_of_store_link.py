"""What `doctor` says of the link to the outer store."""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diloco import link_probe
from shardwright.diloco.link_probe import PlannedLink, check_outer_store_link
from shardwright.diloco.outer_store_server import OuterStore
from shardwright.diloco.round_membership import Membership
from shardwright.plan.island_plans import island_plan, plan_digest
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from tools.pages.page_commands import ROOT

SECRET = b"k" * 32
PLANNED = PlannedLink(gbits_per_second=1e-3, outer_seconds=10.0, between_seconds=40.0)


@functools.cache
def plan_of_an_island() -> Plan:
    return island_plan(
        compile_recipe(load_recipe(ROOT / "recipes/tiny-llama-islands-cpu.yaml")).plan, 1
    )


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Its store listens, and its folder has the secret."""
    monkeypatch.setattr(link_probe, "ENOUGH_SECONDS", 0.02)
    listener = socket.create_server(("127.0.0.1", 0))
    found = plan_of_an_island()
    launch = dataclasses.replace(found.launch, outer_store=f"127.0.0.1:{listener.getsockname()[1]}")
    found = dataclasses.replace(found, launch=launch)
    store = OuterStore(
        Membership(2, 2, 5.0, "fp32"),
        SECRET,
        plan_digest(found),
        lambda line: None,
        lambda line: None,
    )
    threading.Thread(target=store.serve, args=(listener,), daemon=True).start()
    write_secret(tmp_path, SECRET)
    yield found
    listener.close()


def write_secret(folder: Path, secret: bytes) -> None:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "outer.secret").write_bytes(secret + b"\n")


def test_a_link_that_is_as_fast_as_planned(plan: Plan, tmp_path: Path) -> None:
    check = check_outer_store_link(plan, tmp_path, PLANNED)
    assert not check.problems and "0.001 planned; an outer step takes" in check.told
    assert "10 planned, every 40 s; connected islands: none" in check.told


def test_a_slower_link_is_warned_of(plan: Plan, tmp_path: Path) -> None:
    (problem,) = check_outer_store_link(
        plan, tmp_path, dataclasses.replace(PLANNED, gbits_per_second=1e6)
    ).problems
    assert (problem.code, problem.severity) == ("SW5312", "warning")
    measured = float(
        problem.help.partition("inter_island_gbits_per_second=")[2].split(".  ")[0].split(". ")[0]
    )
    seconds = float(problem.message.partition("an outer step takes ")[2].split(" s")[0])
    assert 0 < measured < 1e3 and seconds == pytest.approx(10.0 * 1e6 / measured, rel=0.02)


def test_what_is_missing(plan: Plan, tmp_path: Path) -> None:
    def code_of(other: Plan) -> tuple[str, str]:
        (problem,) = check_outer_store_link(other, tmp_path, PLANNED).problems
        assert problem.severity == "error"
        return problem.code, problem.help

    trained_otherwise = dataclasses.replace(
        plan, training=dataclasses.replace(plan.training, steps=7)
    )
    assert code_of(trained_otherwise)[0] == "SW6316"
    write_secret(tmp_path, b"x" * 32)
    assert code_of(plan)[0] == "SW6313"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    away = dataclasses.replace(
        plan, launch=dataclasses.replace(plan.launch, outer_store=f"127.0.0.1:{port}")
    )
    code, help = code_of(away)
    assert code == "SW6314" and "shardwright outer-store DIR" in help
    (tmp_path / "run" / "outer.secret").unlink()
    code, help = code_of(plan)
    assert code == "SW6313" and "shardwright outer-store DIR" in help
