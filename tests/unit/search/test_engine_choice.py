"""`target: auto`, and the line about the other engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.compile.compiled_folder import read_folder, write_folder
from shardwright.compile.recipe_compiler import compile_recipe, resolve_recipe
from shardwright.cost.layout_costs import price
from shardwright.diagnostics import Refusal
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.report.plan_sentences import other_engine_text
from shardwright.search import engine_choice, forked_call
from shardwright.search.engine_choice import other_engine, resolve_problem, start_engine_comparison
from shardwright.search.layout_search import best_layout, search
from shardwright.search.legal_layouts import Rejections, legal_layouts
from shardwright.search.step_time_bound import StepTimeBound
from tests.unit.models.factory import LLAMA_70B, SMALL_LLAMA, graph_of, problem_of, recipe_of

PINS: dict[str, Any] = {
    "tensor": 8,
    "pipeline": 4,
    "zero_stage": 1,
    "activation_checkpointing": "full",
}


def problem(target: str, config: dict[str, Any] = LLAMA_70B, **pins: Any) -> Problem:
    """Eight nodes of H100; as in a recipe that does not speak of them, virtual stages and a cut
    sequence are plain."""
    training = {"sequence_length": 4096, "global_batch_size": 64}
    keys = {"virtual_stages": 1, "sequence_parallel": False, **pins}
    recipe = recipe_of(
        config, cluster={"nodes": 8}, training=training, parallelism=keys, target=target
    )
    recipe = dataclasses.replace(recipe, document={"target": target})
    return problem_of(recipe, graph_of(config))


def test_auto_takes_the_engine_with_the_better_plan() -> None:
    """A pipeline and tensor ranks are pinned: virtual stages and a cut sequence make it shorter,
    though no key asks."""
    settled, sizing = resolve_problem(problem("auto", **PINS, micro_batch_size=1))
    best = {}
    for target in ("deepspeed", "megatron"):
        free: dict[str, Any] = {}
        if target == "megatron":
            free = {"virtual_stages": None, "sequence_parallel": None}
        best[target] = search(problem(target, **PINS, micro_batch_size=1, **free)).ranked[0]
    chosen = search(settled).ranked[0]
    assert sizing is None and settled.recipe.target == "megatron" and chosen == best["megatron"]
    assert (
        chosen.strategy.sequence_parallel
        and chosen.time.step_seconds < best["deepspeed"].time.step_seconds
    )


def test_auto_takes_the_default_where_it_ranks_first() -> None:
    """Nothing but data ranks: both are the same but for what hides behind the backward pass."""
    pins: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero_stage": 3}
    settled, _ = resolve_problem(problem("auto", **pins))
    assert settled.recipe.target == "deepspeed"  # the other one has no ZeRO-3


@pytest.mark.parametrize(
    "change", [{"model_type": "olmo2"}, {"attention_dropout": 0.1}], ids=["type", "dropout"]
)
def test_what_an_engine_does_not_train_it_is_not_bounded_layouts(change: dict[str, Any]) -> None:
    settled, _ = resolve_problem(problem("auto", {**SMALL_LLAMA, **change}))
    assert settled.recipe.target == "deepspeed"
    assert other_engine(settled, search(settled).ranked[0]) is None


def test_where_no_engine_has_a_way_the_default_says_why() -> None:
    settled, _ = resolve_problem(problem("auto", tensor=3))
    assert settled.recipe.target == "deepspeed" and not search(settled).ranked


@pytest.mark.parametrize(
    ("target", "other"), [("deepspeed", "megatron"), ("megatron", "deepspeed")]
)
def test_the_other_engines_best_stands_beside_a_plan(target: str, other: str) -> None:
    asked = problem(target, **PINS, micro_batch_size=1)
    chosen = search(asked).ranked[0]
    found = other_engine(asked, chosen)
    assert found is not None and (found.target, found.chosen, found.automatic) == (
        other,
        target,
        False,
    )
    assert found.wins == (other == "megatron")
    assert found.slower == pytest.approx(found.step_seconds / chosen.time.step_seconds - 1)
    assert f"target: {other} would take {found.step_seconds:.3g} s" in other_engine_text(found)
    assert (
        f"; deepspeed ranks lower: {found.because}" in other_engine_text(found)
        and " s against " in found.because
    )
    note = "; megatron is not tested on GPUs"
    assert other_engine_text(found).endswith(note) == (other == "megatron")


def test_pins_that_the_other_engine_does_not_have_are_left_out() -> None:
    asked = problem(
        "megatron", **{**PINS, "virtual_stages": 2, "sequence_parallel": True}, micro_batch_size=1
    )
    found = other_engine(asked, search(asked).ranked[0])
    assert (
        found is not None
        and found.strategy.virtual_stages == 1
        and not found.strategy.sequence_parallel
    )


def test_figures_that_are_not_a_run_of_ours_have_no_other_engine() -> None:
    asked = problem("deepspeed", **PINS)
    chosen = search(asked).ranked[0]
    for change in ({"mfu": 0.4}, {"kernels": "megatron"}):
        recipe = dataclasses.replace(
            asked.recipe, assume=dataclasses.replace(asked.recipe.assume, **change)
        )
        assert other_engine(dataclasses.replace(asked, recipe=recipe), chosen) is None
    assert other_engine(problem("reference", **PINS), chosen) is None


@pytest.mark.parametrize(("target", "share"), [("deepspeed", 0.3), ("megatron", 0.5)])
def test_the_comparison_finds_the_best_and_prices_fewer(
    target: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, priced = problem(target), 0

    def counted(*arguments: Any) -> Estimate:
        nonlocal priced
        priced += 1
        return price(*arguments)

    bounded_layouts, least_seconds = 0, StepTimeBound.least_seconds

    def bounded(bound: StepTimeBound, s: Layout) -> float:
        nonlocal bounded_layouts
        bounded_layouts += 1
        return least_seconds(bound, s)

    monkeypatch.setattr("shardwright.search.layout_search.price", counted)
    whole, every = search(asked), priced
    priced = 0
    monkeypatch.setattr(StepTimeBound, "least_seconds", bounded)
    assert best_layout(asked) == whole.ranked[0]
    assert 0 < priced < every
    assert 0 < bounded_layouts < share * sum(map(len, legal_layouts(asked, Rejections())))


def test_the_comparison_is_by_the_objective() -> None:
    asked = problem("megatron")
    leanest = dataclasses.replace(
        asked, recipe=dataclasses.replace(asked.recipe, objective="memory")
    )
    found = best_layout(leanest)
    assert found == search(leanest).ranked[0] and found != best_layout(asked)


def test_a_recipe_for_any_engine_compiles_for_one(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """LoRA is DeepSpeed's alone here: the plan says so, and its folder is read back."""
    pins = {"tensor": 1, "pipeline": 1, "data": 4, "micro_batch_size": 2}
    made = compile_recipe(
        load_recipe(
            write_recipe(
                {"target": "auto", "lora": {"rank": 4}, "parallelism": pins, "model.weights": None}
            )
        )
    )
    assert made.plan.target == "deepspeed"
    write_folder(tmp_path / "out", made.files)
    read = read_folder(tmp_path / "out")
    assert read.recipe.target == "deepspeed" and read.recipe.document["target"] == "auto"


def test_an_engine_that_is_missing_is_named(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs none of its packages; the compile says what to install. virtual_stages are the
    other engine's."""
    monkeypatch.setattr(
        "shardwright.engines.engine_table.Engine.packages",
        property(lambda self: {"no-such-package": ">=1"}),
        raising=False,
    )
    layout = {
        "tensor": 1,
        "pipeline": 2,
        "data": 2,
        "virtual_stages": 2,
        "zero_stage": 1,
        "micro_batch_size": 1,
    }
    path = write_recipe({"target": "auto", "parallelism": layout})
    problem, _ = resolve_recipe(load_recipe(path))
    assert problem.recipe.target == "megatron"
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(path))
    assert {d.code for d in caught.value.diagnostics} == {"SW1923"}


def test_what_is_begun_meanwhile_is_what_would_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, of the problem before it is settled. Of another problem it is not
    used."""
    monkeypatch.setattr(forked_call, "may_fork", lambda: True)
    asked, chosen = problem("deepspeed", **PINS), search(problem("deepspeed", **PINS)).ranked[0]
    expected = other_engine(asked, chosen)
    start_engine_comparison(asked)
    monkeypatch.setattr(
        engine_choice,
        "best_layout",
        lambda problem: pytest.fail("it is worked out in this process"),
    )
    settled, _ = resolve_problem(problem("deepspeed", **PINS))
    assert expected is not None and other_engine(settled, chosen) == expected
    start_engine_comparison(asked)
    with pytest.raises(pytest.fail.Exception):
        other_engine(problem("deepspeed", **PINS, micro_batch_size=1), chosen)


def test_plan_and_explain_say_it(
    write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"nodes": 1, "gpus_per_node": 4, "gpu": "a100-sxm4-80gb"}
    layout = {"tensor": 2, "pipeline": 2, "data": 1, "micro_batch_size": 1}
    path = str(
        write_recipe(
            {
                "target": "auto",
                "cluster": cluster,
                "parallelism": layout,
                "training.precision": "bf16",
            }
        )
    )
    assert main(["plan", path]) == 0
    assert "target: auto takes " in capsys.readouterr().out
    assert main(["plan", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {found["target"], found["other_engine"]["target"]} == {"deepspeed", "megatron"}
    assert main(["explain", path]) == 0
    assert "engine    target: auto takes " in capsys.readouterr().out
