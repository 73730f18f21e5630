"""A schedule that leaves a fifth of a run and more untrained is said at compile."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.parallel.learning_rate import learning_rate
from shardwright.plan.plan import resolve_scheduler, zero_learning_rate_updates
from shardwright.recipe.recipe_types import OptimizerSection, SchedulerSection
from shardwright.search.rule_registry import check_layout
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import GOOD

SCHEDULES = [
    ("cosine", 0, None),
    ("linear", 3, None),
    ("constant", 0, None),
    ("cosine", 0, 1e-5),
    ("wsd", 1, None),
    ("cosine_with_restarts", 0, None),
    ("polynomial", 0, None),
    ("inverse_sqrt", 2, None),
    ("cosine_warmup_with_min_lr", 0, 0.0),
]


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@pytest.mark.parametrize(("name", "warmup", "min_lr"), SCHEDULES)
def test_the_count_is_that_of_the_formula(
    name: str, warmup: int, min_lr: float | None, steps: int, first_step: int
) -> None:
    recipe = recipe_of()
    section = SchedulerSection(
        name=name,
        warmup_steps=warmup,
        warmup_ratio=None,
        min_lr=min_lr,
        min_lr_ratio=None,
        decay_steps=1 if name == "wsd" else None,
        first_step=first_step,
    )
    training = dataclasses.replace(
        recipe.training, steps=steps, tokens=None, epochs=None, scheduler=section
    )
    optimizer: OptimizerSection = training.optimizer
    scheduler = resolve_scheduler(training, steps)
    rates = [learning_rate(optimizer, scheduler, steps, update) for update in range(1, steps + 1)]
    assert zero_learning_rate_updates(training) == sum(rate == 0 for rate in rates), rates

    recipe = dataclasses.replace(recipe, training=training)
    problem = Problem(
        recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
    )
    said = [d for d in check_layout(problem, GOOD) if d.code == "SW3220"]
    assert [d.severity for d in said] == ["warning"] * (0 in rates and steps <= 5), said
    if said:
        begins = first_step == 0 and name != "cosine_warmup_with_min_lr"
        assert ("first update of a warm-up" in said[0].message) == begins
    if steps == 1 and said:
        assert said[0].message.startswith("nothing is trained")
