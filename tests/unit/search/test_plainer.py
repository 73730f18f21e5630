"""A plainer layout within the prediction's error is named, with what the best one gives up."""

from __future__ import annotations

import dataclasses

from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import Estimate
from shardwright.search.plainer import FOR_SCRIPTS, plainer, plainer_words
from shardwright.search.search import search
from tests.unit.model.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of


def ranked_of(recipe: Recipe) -> tuple[Estimate, ...]:
    return search(problem_of(recipe, graph_of(SMALL_LLAMA))).ranked


def taking(estimate: Estimate, seconds: float) -> Estimate:
    return dataclasses.replace(estimate, time=dataclasses.replace(estimate.time, step_seconds=seconds))


def find(ranked: tuple[Estimate, ...], **layout: object) -> Estimate:
    return next(e for e in ranked if all(getattr(e.strategy, k) == v for k, v in layout.items()))


def test_a_plainer_layout_within_the_error() -> None:
    recipe = recipe_of()
    ranked = ranked_of(recipe)
    pipeline = find(ranked, pipeline=2, tensor=1, schedule="1f1b")
    dual = find(ranked, pipeline=2, tensor=1, schedule="dualpipev")
    split = find(ranked, pipeline=1, tensor=2)
    plain = find(ranked, pipeline=1, tensor=1)
    assert plainer(recipe, ()) is None
    assert plainer(recipe, (taking(plain, 1.0), taking(dual, 1.01))) is None
    # Another axis is no plainer, and the plain one is too slow.
    assert plainer(recipe, (taking(dual, 1.0), taking(split, 1.001), taking(plain, 1.1))) is None
    found = plainer(recipe, (taking(dual, 1.0), taking(pipeline, 1.001), taking(plain, 1.008)))
    assert found is not None and (found.place, found.strategy) == (3, plain.strategy)
    assert found.without == ("a pipeline", "dualpipev") and found.gives_up == (FOR_SCRIPTS, "LoRA")
    assert "0.8% slower" in plainer_words(found) and "row 1 gives up accelerate/" in plainer_words(found)
    found = plainer(recipe, (taking(dual, 1.0), taking(pipeline, 1.001)))
    assert found is not None and found.without == ("dualpipev",) and found.gives_up == ()
    assert "gives up" not in plainer_words(found)


def test_who_asks_for_memory_is_not_told_of_speed() -> None:
    recipe = recipe_of()
    ranked = ranked_of(recipe)
    pair = (taking(find(ranked, pipeline=2, tensor=1), 1.0), taking(find(ranked, pipeline=1, tensor=1), 1.001))
    assert plainer(recipe, pair) is not None
    assert plainer(dataclasses.replace(recipe, objective="memory"), pair) is None
