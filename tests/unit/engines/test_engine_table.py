"""The table of engines: what a plan and a recipe find in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.engines.engine_definition import EngineTraits
from shardwright.engines.engine_table import AUTO_TARGET, DEFAULT_TARGET, ENGINES, engine_of
from shardwright.engines.run_profiles import assumed_runs, kernel_profile
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import recipe_schema, schema_properties
from shardwright.search.training_rules import engine_recipe_errors
from tools.fit_cost.assumed_runs import ASSUMED_RUNS

TESTS = Path(__file__).parents[2]


def test_a_plan_finds_its_engine() -> None:
    (case,) = TESTS.glob("cases/llama-pp2-tp2/expected")
    plan = read_plan(case)
    assert plan.target == "deepspeed" and engine_of(plan) is ENGINES[plan.target]


@pytest.mark.parametrize("target", ["deepseed"])
def test_a_plan_for_an_engine_that_is_not_there_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = TESTS.glob("cases/llama-pp2-tp2/expected")
    plan = json.loads((case / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "target": target}))
    with pytest.raises(Refusal) as caught:
        engine_of(read_plan(tmp_path))
    assert [d.code for d in caught.value.diagnostics] == ["SW6001"]
    assert main(["run", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert (
        f"target: {target}" in told
        and "deepspeed, reference, megatron" in told
        and "shardwright compile" in told
    )


def test_the_recipe_offers_the_table() -> None:
    offered = schema_properties(recipe_schema(), {})
    assert (
        offered["target"]["enum"] == [*ENGINES, AUTO_TARGET]
        and offered["target"]["default"] == DEFAULT_TARGET
    )
    assume = schema_properties(offered["assume"], {})
    assert assume["kernels"]["enum"] == ["auto", *assumed_runs()["kernels"]]


def test_a_kernel_set_names_an_engine_of_the_table() -> None:
    profiles = [kernel_profile(kernels, "") for kernels in assumed_runs()["kernels"]]
    assert {profile.engine_without_zero for profile in profiles} - {None} <= ENGINES.keys()


def test_an_engine_may_have_kernels_of_its_own() -> None:
    """nanotron's norms are Triton's; PyTorch's FSDP runs the modules' own."""
    nanotron, fsdp = (kernel_profile("hf", "llama", target) for target in ("megatron", "deepspeed"))
    assert nanotron == dataclasses.replace(fsdp, eager_rms_norm=2) and fsdp.eager_rms_norm > 2


def test_the_packaged_runs_are_those_of_the_fit() -> None:
    assert assumed_runs() == {"written_by": "make fit-cost", **ASSUMED_RUNS}
    traits = {field.name for field in dataclasses.fields(EngineTraits)}
    for target, engines in assumed_runs()["engines"].items():
        assert target in ENGINES and engines.keys() <= assumed_runs()["kernels"].keys()
        assert all(engine["traits"].keys() <= traits for engine in engines.values())


@pytest.mark.parametrize(
    ("changes", "row", "key", "value"),
    [
        ({"training.precision": "bf16"}, {"precisions": ("fp32",)}, "training.precision", "bf16"),
        ({}, {"optimizers": {"other": "Other"}}, "training.optimizer.name", "adamw"),
        ({"model.task": "causal-lm"}, {"tasks": frozenset()}, "model.task", "causal-lm"),
    ],
)
@pytest.mark.parametrize("target", ENGINES)
def test_what_the_row_does_not_declare_is_refused(
    target: str,
    changes: dict[str, Any],
    row: dict[str, Any],
    key: str,
    value: str,
    write_recipe: Callable[..., Path],
) -> None:
    """One rule reads the row: an engine without the value refuses it, with its own code, and the
    help names an engine that has it."""
    recipe = load_recipe(write_recipe({"target": target, **changes}))
    engine = ENGINES[target]
    assert engine_recipe_errors(engine, recipe) == ()
    (error,) = engine_recipe_errors(dataclasses.replace(engine, **row), recipe)
    assert error.code == engine.refusal_code and error.key == tuple(key.split("."))
    assert f"{key}: {value} does not run under target: {target}" in error.message
    assert error.help.startswith(f"Change {key}, or write `target: ")


def test_fp16_is_refused_by_the_engines_without_a_loss_scale(
    write_recipe: Callable[..., Path],
) -> None:
    recipe = load_recipe(write_recipe({"training.precision": "fp16"}))
    codes = {
        name: [d.code for d in engine_recipe_errors(engine, recipe)]
        for name, engine in ENGINES.items()
    }
    assert codes == {"deepspeed": [], "reference": ["SW1921"], "megatron": ["SW1922"]}
