"""What must hold on this machine before the launcher starts."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.host_checks import HostCheckInput, _versions
from shardwright.launch.host_probe import HostFacts, ProbedHost
from shardwright.launch.preflight_checks import check_preflight
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.factory import write_weights


def test_weights_that_are_gone(
    write_recipe: Callable[..., Path], small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    write_weights(folder, small_recipe["model"]["config"])
    plan = compile_recipe(load_recipe(write_recipe({"model": {"source": "./weights"}}))).plan
    check_preflight(plan, tmp_path, None)
    shutil.rmtree(folder)
    with pytest.raises(Refusal) as caught:
        check_preflight(plan, tmp_path, None)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SW6007" and str(folder) in diagnostic.message


def test_what_a_plan_needs_beyond_the_usual_packages(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """flash-attn, where the plan's attention is its: `run` says so here, `doctor` of each host."""
    plain = compile_recipe(load_recipe(write_recipe({}))).plan
    flash = dataclasses.replace(
        plain, model=dataclasses.replace(plain.model, attention="flash_attention_2")
    )
    versions = {**plain.versions, "peft": None, "flash_attn": None}
    facts = HostFacts(versions=versions, python=platform.python_version())
    for plan, expected in (
        (plain, []),
        (flash, ["b: flash_attn is not installed, but the plan needs it"]),
    ):
        answers: tuple[ProbedHost, ...] = (
            ProbedHost(
                host="a",
                facts=dataclasses.replace(facts, versions={**versions, "flash_attn": "2.8.3"}),
            ),
            ProbedHost(host="b", facts=facts),
        )
        found = _versions(
            HostCheckInput(plan=plan, folder=tmp_path, shared=True, answers=answers, digest=None)
        )
        assert [d.message for d in found.problems] == expected
        assert _refused(plan, tmp_path) == (["SW6009"] if expected else [])


def _refused(plan: Plan, folder: Path) -> list[str]:
    try:
        check_preflight(plan, folder, None)
    except Refusal as refusal:
        return [d.code for d in refusal.diagnostics]
    return []
