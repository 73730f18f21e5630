"""The search proposes what the pins and the rules allow, ranked, and explains the rest."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cli.main import main
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.tensor_parallel_plan import proved
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_search import (
    SearchResult,
    baselines,
    choose_layout,
    estimate_pinned_layout,
    search,
)
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.ranking_penalties import penalized_seconds
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    SMALL_GPT2,
    SMALL_LLAMA,
    graph_of,
    problem_of,
    recipe_of,
)


def run(recipe: Recipe) -> SearchResult:
    assert recipe.model.config is not None
    return search(problem_of(recipe, graph_of(dict(recipe.model.config))))


def pick(recipe: Recipe) -> Estimate:
    assert recipe.model.config is not None
    return choose_layout(problem_of(recipe, graph_of(dict(recipe.model.config))))


def refused(recipe: Recipe) -> tuple[Diagnostic, ...]:
    with pytest.raises(Refusal) as caught:
        pick(recipe)
    return caught.value.diagnostics


PINS: dict[str, list[object]] = {
    "tensor": [1, 2, 4],
    "pipeline": [1, 2, 3],
    "data": [1, 2, 4],
    "zero_stage": [0, 1, 2, 3],
    "micro_batch_size": [1, 2, 4],
    "activation_checkpointing": ["none", "selective", "full"],
    "schedule": ["1f1b", "dualpipev"],
}


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from([SMALL_LLAMA, SMALL_GPT2, {**SMALL_GPT2, "attn_pdrop": 0.1}]),
    pins=st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in PINS.items()}),
    batch=st.sampled_from([6, 16]),
)
def test_what_is_proposed_keeps_pins_and_rules(
    config: dict[str, JsonValue], pins: dict[str, object], batch: int
) -> None:
    recipe = recipe_of(config, parallelism=pins, training={"global_batch_size": batch})
    cluster = resolve_cluster(recipe.cluster)
    result = run(recipe)
    for estimate in result.ranked:
        s = estimate.strategy
        assert {key: getattr(s, key) for key in pins} == pins
        assert s.world_size == 8
        assert s.micro_batch_size * s.gradient_accumulation_steps * s.data == batch
        assert all(
            d.severity == "warning"
            for d in check_layout(
                Problem(recipe=recipe, graph=graph_of(config), cluster=cluster), s
            )
        )
        assert estimate.memory.fits and estimate.feasible
    # Nothing is lost: every candidate is ranked, counted as slower, or in a rejected region.
    tried = len(list(candidate_layouts(problem_of(recipe, graph_of(config), cluster))))
    assert (
        len(result.ranked) + len(result.skipped) + sum(region.count for region in result.rejected)
        == tried
    )
    weighed = [penalized_seconds(recipe, e) for e in result.ranked]
    assert weighed == pytest.approx(sorted(weighed))
    if result.ranked:
        assert pick(recipe) == result.ranked[0]
    else:
        assert all(d.severity == "error" and d.help for d in refused(recipe))


def test_it_is_deterministic() -> None:
    assert run(recipe_of()).ranked == run(recipe_of()).ranked


def test_the_space_has_every_kind_of_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.search.layout_search.PRICED_WHOLE", 10**9)
    ranked = [e.strategy for e in run(recipe_of(training={"global_batch_size": 64})).ranked]
    assert {s.tensor for s in ranked} == {
        1,
        2,
        4,
        8,
    }  # four key/value heads: over eight ranks each is held by two
    assert {s.pipeline for s in ranked} == {1, 2, 4}
    assert {s.zero_stage for s in ranked} == {1, 2, 3}  # bf16 accumulates in fp32: not without ZeRO
    assert {s.schedule for s in ranked} == {"1f1b", "dualpipev"}
    assert {s.activation_checkpointing for s in ranked} == {"none", "selective", "full"}
    assert {s.zero_stage for s in ranked if s.pipeline > 1} == {1}


def test_rejected_regions_name_the_rule() -> None:
    config = {**SMALL_LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
    regions = {region.code: region for region in run(recipe_of(config)).rejected}
    assert {"SW3104", "SW3107", "SW3108", "SW3106"} <= set(regions)
    assert "pipeline" in regions["SW3108"].reason
    assert regions["SW3108"].count > 1
    assert regions["SW3108"].example.zero_stage >= 2


def test_the_fallback_stands_below_the_same_layout_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank computes all heads and keeps the whole feed-forward."""
    pins: dict[str, object] = {"tensor": 4, "pipeline": 1, "zero_stage": 1, "micro_batch_size": 1}
    pins["activation_checkpointing"] = "none"
    sharded = pick(recipe_of(LLAMA_8B, parallelism=pins))
    monkeypatch.setitem(proved(), "llama", "fallback")
    other = {**LLAMA_8B, "rms_norm_eps": 2e-6}  # not the graph of before
    fallback = pick(recipe_of(other, parallelism=pins))
    assert graph_of(other).tensor_parallel_kind == "fallback"
    assert fallback.time.step_seconds > sharded.time.step_seconds
    assert fallback.memory.peak_bytes > sharded.memory.peak_bytes


def test_objective_memory() -> None:
    lean = pick(recipe_of(objective="memory"))
    fast = pick(recipe_of())
    assert lean.memory.peak_bytes <= fast.memory.peak_bytes
    assert lean.time.step_seconds >= fast.time.step_seconds
    assert lean.strategy != fast.strategy


@pytest.mark.parametrize(
    ("pins", "code", "key"),
    [
        ({"pipeline": 2, "zero_stage": 3}, "SW3108", "zero_stage"),
        ({"pipeline": 2, "zero_stage": 0}, "SW3107", "zero_stage"),
        ({"pipeline": 8}, "SW3106", "pipeline"),
        ({"schedule": "dualpipev", "pipeline": 1}, "SW3110", "schedule"),
        ({"offload": "parameters", "zero_stage": 2}, "SW3111", "zero_stage"),
        ({"expert": 2}, "SW3147", "expert"),
    ],
)
def test_an_illegal_pin_is_explained_at_its_key(
    pins: dict[str, object], code: str, key: str
) -> None:
    assert [(d.code, d.key) for d in refused(recipe_of(parallelism=pins))] == [
        (code, ("parallelism", key))
    ]


def test_several_illegal_pins_are_all_explained() -> None:
    found = refused(recipe_of(parallelism={"tensor": 3, "pipeline": 2, "zero_stage": 3}))
    assert {d.code for d in found} == {"SW3101", "SW3103", "SW3104", "SW3105", "SW3108", "SW3112"}


def test_a_batch_that_does_not_divide() -> None:
    found = refused(recipe_of(parallelism={"data": 8}, training={"global_batch_size": 12}))
    assert [(d.code, d.key, d.valid) for d in found] == [
        ("SW3102", ("training", "global_batch_size"), ("8", "16"))
    ]
    assert [d.code for d in refused(recipe_of(parallelism={"micro_batch_size": 5}))] == ["SW3102"]


def test_a_model_that_fits_nowhere() -> None:
    (found,) = refused(recipe_of(LLAMA_405B))
    assert found.code == "SW3202"
    assert "80.0 GiB" in found.message and "closest layout" in found.help


def test_the_pinned_layout_is_priced_even_if_forbidden() -> None:
    recipe = recipe_of(
        parallelism={
            "tensor": 2,
            "pipeline": 2,
            "data": 2,
            "zero_stage": 3,
            "micro_batch_size": 2,
            "activation_checkpointing": "full",
            "schedule": "1f1b",
        }
    )
    found = estimate_pinned_layout(problem_of(recipe, graph_of(SMALL_LLAMA)))
    assert not found.feasible and found.time.step_seconds > 0
    assert [d.code for d in found.diagnostics] == ["SW3108"]
    partly = recipe_of(parallelism={"pipeline": 2, "zero_stage": 3})
    found = estimate_pinned_layout(problem_of(partly, graph_of(SMALL_LLAMA)))
    assert (found.strategy.pipeline, found.strategy.zero_stage, found.feasible) == (2, 3, False)


def test_autos_of_an_estimate_are_filled_by_the_search() -> None:
    recipe = recipe_of(parallelism={"tensor": 2})
    cluster = resolve_cluster(recipe.cluster)
    assert estimate_pinned_layout(problem_of(recipe, graph_of(SMALL_LLAMA), cluster)) == pick(
        recipe
    )


def test_baselines_are_what_one_would_run_today() -> None:
    recipe = recipe_of(LLAMA_8B, parallelism={"pipeline": 2, "tensor": 2})
    found = baselines(problem_of(recipe, graph_of(LLAMA_8B)))
    assert [(e.strategy.tensor, e.strategy.pipeline, e.strategy.zero_stage) for e in found] == [
        (1, 1, 2),
        (1, 1, 3),
    ]
    wide = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, global_batch_size=4)
    )
    assert baselines(problem_of(wide, graph_of(LLAMA_8B))) == ()


def test_a_large_search_takes_seconds() -> None:
    """70B on 512 GPUs: a few thousand layouts."""
    recipe = recipe_of(
        LLAMA_70B,
        cluster={"nodes": 64},
        training={"sequence_length": 8192, "global_batch_size": 1024},
    )
    result = run(recipe)
    assert result.ranked
    assert sum(region.count for region in result.rejected) > 1000
    assert result.seconds < 10


def test_rows_of_a_million_tokens_plan_and_what_is_beyond_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With context ranks, recomputation and a chunked loss; tiles and inputs in host memory are not
    there."""
    asked = [
        "plan",
        "meta-llama/Llama-3.1-8B",
        "--gpu",
        "h100-sxm-80gb",
        "--global-batch-size",
        "8",
        "--top",
        "1",
    ]
    assert main([*asked, "--nodes", "4", "--sequence-length", str(2**20)]) == 0
    assert "CP 8" in capsys.readouterr().out
    assert main([*asked, "--nodes", "1", "--sequence-length", str(2**23)]) == 1
    refused = capsys.readouterr().err
    assert (
        "error[SW3202]" in refused
        and "feed-forward layers in tiles" in refused
        and "does not have" in refused
    )


def test_an_nvlink_domain_improves_the_plan() -> None:
    """GB200 NVL72: hosts of 4 GPUs that NVLink joins."""

    def best(domain: int | None) -> Estimate:
        cluster = {"nodes": 16, "gpus_per_node": 4, "gpu": "gb200-nvl-186gb"}
        training = {"sequence_length": 8192, "global_batch_size": 128}
        recipe = recipe_of(
            LLAMA_70B, cluster={**cluster, "nvlink_domain_gpus": domain}, training=training
        )
        return pick(recipe)

    whole, hosts = best(None), best(4)
    assert whole == best(72)
    assert whole.time.step_seconds < 0.97 * hosts.time.step_seconds
