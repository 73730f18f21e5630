"""Recomputation of single modules of a layer: which engine, model and layout has it, and where a
search chooses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cost.peak_memory import estimate_memory
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import RECOMPUTE_MODULES
from shardwright.search.layout_resolution import (
    price_planned_layout,
    searched_modules,
    with_stages_assigned,
)
from shardwright.search.layout_search import search
from shardwright.search.step_time_bound import StepTimeBound
from tests.unit.engines.test_megatron import EXPERTS
from tests.unit.engines.test_recompute_modules import SHARED, changes_of, errors
from tests.unit.engines.test_transformer_engine import LLAMA
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of


@pytest.mark.parametrize("target", ["deepspeed", "reference"])
def test_other_engines_recompute_no_single_module(
    target: str, write_recipe: Callable[..., Path]
) -> None:
    found = errors(write_recipe, {**changes_of(["mlp"]), "target": target})
    assert f"target: {target}" in found["SW3195"] and "[mlp]" in found["SW3195"]
    assert "SW3195" not in errors(write_recipe, changes_of(["mlp"]))


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no experts": ({"model__config": LLAMA}, ["moe", "mlp"], "moe: the model has no experts"),
    "no activation of experts": ({"model__config": LLAMA}, ["moe_act"], "the model has no experts"),
    "no shared experts": (
        {"model__config": EXPERTS},
        ["shared_experts"],
        "the model has no shared experts",
    ),
    "no latent attention": (
        {"model__config": EXPERTS},
        ["mla_up_proj"],
        "the model has no latent attention",
    ),
    "no dense layer": ({"model__config": EXPERTS}, ["mlp"], "every layer is a mixture of experts"),
    "no grouped experts": (
        {"model__config": EXPERTS, "model__transformer_engine": "off"},
        ["moe_act", "layernorm"],
        "model.transformer_engine is off",
    ),
    "no grouped experts on CPUs": (
        {"model__config": EXPERTS, "cluster__gpu": "cpu", "training__precision": "fp32"},
        ["moe_act"],
        "Transformer Engine's layers run only on GPUs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_is_not_there(name: str, write_recipe: Callable[..., Path]) -> None:
    more, modules, why = REFUSED[name]
    found = errors(write_recipe, changes_of(modules, **more))
    assert why in found["SW3196"]
    assert "layernorm:" not in found["SW3196"] and "mlp: " not in found["SW3196"].replace(
        "mlp: every", ""
    )


def test_every_module_has_a_model_that_has_it(write_recipe: Callable[..., Path]) -> None:
    changes = changes_of(list(RECOMPUTE_MODULES), model__config=SHARED)
    changes["parallelism"]["data"], changes["parallelism"]["pipeline"] = 2, 2
    assert "SW3196" not in errors(write_recipe, changes)


LATENT = {
    **LLAMA_8B,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 16,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
}
OPEN: dict[str, Any] = {"zero_stage": 1, "schedule": "1f1b", "offload": "none", "context": 1}
OPEN |= {"virtual_stages": 1, "micro_batch_size": "auto", "sequence_parallel": "auto"}


def problem(config: dict[str, Any] = LATENT, target: str = "megatron", **pins: Any) -> Problem:
    recipe = recipe_of(
        config,
        target=target,
        cluster={"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        training={"sequence_length": 8192, "global_batch_size": 64, "precision": "bf16"},
        parallelism={**OPEN, **pins},
    )
    return problem_of(recipe, graph_of(config))


def test_a_search_recomputes_modules_where_nothing_recomputed_does_not_fit() -> None:
    asked = problem(pipeline=1, micro_batch_size=2)
    found = [e for e in search(asked).ranked if e.strategy.recompute_modules]
    bound = StepTimeBound(asked)
    assert len(found) > 1
    for e in found:
        s = e.strategy
        lists = searched_modules(asked, s)
        assert s.recompute_modules in lists and e.memory.fits
        modes: list[Any] = ["none", *lists[: lists.index(s.recompute_modules)]]
        for mode in modes:
            other = dataclasses.replace(s, activation_checkpointing=mode)
            limit = estimate_memory(with_stages_assigned(asked, s)).capacity_bytes
            assert estimate_memory(with_stages_assigned(asked, other)).peak_bytes > 0.9 * limit
        whole = dataclasses.replace(s, activation_checkpointing="full")
        least = bound.least_module_checkpointing_seconds(whole)
        assert least <= e.time.step_seconds * (1 + 1e-9)
        _, again = price_planned_layout(asked, s, e.boundaries)
        assert (again.time, again.memory) == (e.time, e.memory)


@pytest.mark.parametrize("config", [LATENT, LLAMA_8B], ids=["latent", "dense"])
def test_bounds_lose_no_list_that_could_win(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = problem(config, pipeline=2, micro_batch_size=2)
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    complete = search(asked)
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 0)
    pruned = search(dataclasses.replace(asked))
    assert any(e.strategy.recompute_modules for e in complete.ranked)
    assert pruned.ranked[0] == complete.ranked[0]
    assert all(e in complete.ranked for e in pruned.ranked)


def test_what_a_search_tries_is_of_the_model_and_the_engine() -> None:
    def tried(asked: Problem) -> tuple[tuple[str, ...], ...]:
        return searched_modules(asked, search(asked).ranked[0].strategy)

    pins: dict[str, Any] = {"tensor": 1, "pipeline": 1, "micro_batch_size": 1}
    assert tried(problem(**pins)) == (
        ("mla_up_proj", "moe_act"),
        ("layernorm", "mla_up_proj", "moe_act"),
        ("mlp", "moe"),
    )
    assert tried(problem(LLAMA_8B, **pins)) == (("mlp",),)
    assert tried(problem(LLAMA_8B, target="deepspeed", **pins)) == ()
    pinned = problem(LLAMA_8B, activation_checkpointing="full", **pins)
    assert tried(pinned) == ()
