"""A schedule that leaves a share of a short run untrained. Of the recipe alone."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.plan.plan import zero_learning_rate_updates

WARN_FROM_SHARE = 0.2
"""Of all updates: of longer runs `explain` tells that the last one is at the rate 0."""


def learning_rate_is_zero(x: Candidate) -> Diagnostic | None:
    """Update k of n has the rate of the curve at k / n, so the last one is at min_lr. transformers'
    schedules take it at (k - 1) / n: their first update is at lr, and none is at 0."""
    training = x.recipe.training
    zero, steps = zero_learning_rate_updates(training), training.step_count_or_zero
    if zero < WARN_FROM_SHARE * steps or zero == 0 or training.epochs is not None:
        return None
    name = training.scheduler.name
    trains = "nothing is trained" if zero == steps else f"{zero} of {steps} updates trains nothing"
    return found(
        "SW3220",
        "training.scheduler.min_lr"
        if training.scheduler.min_lr is not None
        else "training.scheduler",
        f"{trains}: the last update of a {name} schedule with min_lr 0 has the learning rate 0",
        "Write `scheduler: {name: constant}` for a trial run of a few steps, or a min_lr above 0. "
        "Under transformers' schedules update k has the rate that is update k - 1's here.",
        severity="warning",
    )
