"""Headroom and moving parts are prices: what is set aside for them is named, with why."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.peak_memory import bytes_with_headroom
from shardwright.cost.prediction_errors import error_benchmark
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.plan_sentences import rejected_faster_text
from shardwright.search.layout_comparison import because
from shardwright.search.layout_search import choose_layout, rank_key, search
from shardwright.search.ranking_penalties import (
    SAFE_FIT_PROBABILITY,
    fit_probability,
    penalized_seconds,
    risk_adjusted_seconds,
)
from shardwright.search.rejected_faster_layouts import ACCELERATE_FILES, rejected_faster_layouts
from tests.unit.models.factory import LLAMA_70B, SMALL_LLAMA, graph_of, problem_of, recipe_of


def ranked_of(recipe: Recipe) -> tuple[Estimate, ...]:
    return search(problem_of(recipe, graph_of(SMALL_LLAMA))).ranked


def taking(estimate: Estimate, seconds: float, share: float | None = None) -> Estimate:
    """share: of the device that it fills; as it is where None."""
    peak = (
        estimate.memory.peak_bytes
        if share is None
        else round(share * estimate.memory.capacity_bytes)
    )
    memory = dataclasses.replace(estimate.memory, peak_bytes=peak)
    return dataclasses.replace(
        estimate, memory=memory, time=dataclasses.replace(estimate.time, step_seconds=seconds)
    )


def find(ranked: tuple[Estimate, ...], **layout: object) -> Estimate:
    return next(e for e in ranked if all(getattr(e.strategy, k) == v for k, v in layout.items()))


def in_order(recipe: Recipe, *estimates: Estimate) -> tuple[Estimate, ...]:
    return tuple(sorted(estimates, key=lambda e: rank_key(recipe, e)))


def test_the_chance_of_fitting() -> None:
    recipe = recipe_of()
    some = ranked_of(recipe)[0]
    chances = [
        fit_probability(recipe, taking(some, 1.0, share).memory)
        for share in (0.5, 0.91, 0.95, 0.99, 1.1)
    ]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.9999 and chances[3] > 0.5 > chances[4]
    # Where memory_headroom ends it is what the constant says, and costs nothing; from there on it
    # does, without a step.
    capacity = some.memory.capacity_bytes
    edge = bytes_with_headroom(capacity) / capacity
    assert fit_probability(recipe, taking(some, 1.0, edge).memory) == pytest.approx(
        SAFE_FIT_PROBABILITY, abs=1e-6
    )
    assert risk_adjusted_seconds(recipe, taking(some, 1.0, edge - 0.1)) == 1.0
    assert risk_adjusted_seconds(recipe, taking(some, 1.0, edge)) == pytest.approx(1.0, abs=1e-5)
    assert 1.01 < risk_adjusted_seconds(recipe, taking(some, 1.0, edge + 0.01)) < 1.1
    # Who says how much to keep free has weighed it.
    pinned = recipe_of(parallelism={"memory_headroom": 0.0})
    assert risk_adjusted_seconds(pinned, taking(some, 1.0, 0.999)) == 1.0


def test_what_cannot_fit_at_all_is_still_ranked() -> None:
    recipe = recipe_of()
    some = ranked_of(recipe)[0]
    beyond = taking(some, 1.0, 100.0)
    assert fit_probability(recipe, beyond.memory) == 0 and risk_adjusted_seconds(
        recipe, beyond
    ) == float("inf")
    assert in_order(recipe, beyond, some) == (some, beyond)


def test_headroom_is_a_price_and_no_wall() -> None:
    recipe = recipe_of()
    plain = find(ranked_of(recipe), pipeline=1, tensor=1)
    slow, tight = taking(plain, 3.0, 0.8), taking(plain, 1.0, 0.96)
    assert in_order(recipe, slow, tight) == (tight, slow)
    assert rejected_faster_layouts(recipe, (tight, slow)) == ()
    slow, tight = taking(plain, 1.1, 0.8), taking(plain, 1.0, 0.97)
    assert in_order(recipe, tight, slow) == (slow, tight)
    (found,) = rejected_faster_layouts(recipe, (slow, tight))
    assert found.place == 2 and found.needs == () and found.faster == pytest.approx(1 - 1 / 1.1)
    assert 0.6 < found.chance < 0.8
    assert "would be 9.1% faster, but needs" in rejected_faster_text(
        found
    ) and "may not fit: predictions of memory are up to 9% too low" in rejected_faster_text(found)
    assert "it may not fit" in because(recipe, tight, slow)


def test_plain_comes_first_within_the_error() -> None:
    recipe = recipe_of()
    ranked = ranked_of(recipe)
    pipeline = find(ranked, pipeline=2, tensor=1, schedule="1f1b")
    dual = find(ranked, pipeline=2, tensor=1, schedule="dualpipev")
    split = find(ranked, pipeline=1, tensor=2)
    plain = find(ranked, pipeline=1, tensor=1)
    error = error_benchmark().time.error
    assert penalized_seconds(recipe, taking(dual, 1.0)) == pytest.approx((1 + error) ** 2)
    order = in_order(recipe, taking(dual, 1.0), taking(pipeline, 1.01), taking(plain, 1.04))
    assert [e.strategy for e in order] == [plain.strategy, pipeline.strategy, dual.strategy]
    (found,) = rejected_faster_layouts(recipe, order)
    assert found.strategy == dual.strategy and found.needs == ("a pipeline", "dualpipev")
    assert found.unavailable_features == (
        ACCELERATE_FILES,
        "LoRA",
    ) and "it gives up accelerate/" in rejected_faster_text(found)
    assert "needs a pipeline and dualpipev" in because(recipe, order[2], order[0])
    # Each part has to win more than the error, and both more than twice.
    order = in_order(recipe, taking(dual, 1.0), taking(pipeline, 1.01), taking(plain, 1.08))
    assert [e.strategy for e in order] == [pipeline.strategy, plain.strategy, dual.strategy]
    (found,) = rejected_faster_layouts(recipe, order)
    assert (
        found.needs == ("dualpipev",)
        and found.unavailable_features == ()
        and "gives up" not in rejected_faster_text(found)
    )
    assert rejected_faster_layouts(recipe, (taking(split, 1.0), taking(plain, 1.2))) == ()
    assert rejected_faster_layouts(recipe, ()) == ()


def test_who_asks_for_memory_is_not_told_of_speed() -> None:
    recipe = recipe_of()
    ranked = ranked_of(recipe)
    pair = (
        taking(find(ranked, pipeline=1, tensor=1), 1.01),
        taking(find(ranked, pipeline=2, tensor=1), 1.0),
    )
    assert rejected_faster_layouts(recipe, pair)
    assert rejected_faster_layouts(dataclasses.replace(recipe, objective="memory"), pair) == ()


def test_llama_70b_on_eight_b200_is_zero_3() -> None:
    """Tensor 8, which leaves 9 % of the memory free, takes three times as long."""
    recipe = recipe_of(
        LLAMA_70B,
        cluster={"nodes": 1, "gpu": "b200-sxm-180gb"},
        training={
            "sequence_length": 4096,
            "global_batch_size": 64,
            "gradient_accumulation_dtype": "fp32",
        },
    )
    best = choose_layout(problem_of(recipe, graph_of(LLAMA_70B)))
    assert (best.strategy.tensor, best.strategy.pipeline, best.strategy.zero_stage) == (1, 1, 3)
    assert 0.5 < fit_probability(recipe, best.memory) < SAFE_FIT_PROBABILITY
