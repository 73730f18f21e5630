"""Faster layouts that rank behind the best one: what may not fit, and what has more moving parts
for too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.ranking_penalties import (
    complexity_features,
    fit_probability,
    risk_adjusted_seconds,
)

ACCELERATE_FILES = "accelerate/ (its settings for the Hugging Face Trainer and Accelerate)"
MIN_GAIN_SHOWN = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedFasterLayout:
    """place: in the ranking, from 1. faster: 1 less its step over the best one's. chance: of
    fitting; it is why, where `needs` is empty. needs: the parts that it has and the best layout has
    not, which are why otherwise. unavailable_features: what a run with it cannot have, and with the
    best layout can."""

    place: int
    strategy: Layout
    faster: float
    chance: float
    peak_bytes: int
    capacity_bytes: int
    needs: tuple[str, ...]
    unavailable_features: tuple[str, ...]


def rejected_faster_layouts(
    recipe: Recipe, ranked: Sequence[Estimate]
) -> tuple[RejectedFasterLayout, ...]:
    """The fastest of each reason, memory's first. None where memory itself is the objective."""
    if not ranked or recipe.objective == "memory":
        return ()
    best = ranked[0]
    mine, most = complexity_features(best.strategy), best.time.step_seconds * (1 - MIN_GAIN_SHOWN)
    fastest: dict[bool, RejectedFasterLayout] = {}
    behind = [(e, place) for place, e in enumerate(ranked, start=1) if e.time.step_seconds < most]
    for e, place in sorted(behind, key=lambda each: each[0].time.step_seconds):
        may_not_fit = risk_adjusted_seconds(recipe, e) >= risk_adjusted_seconds(recipe, best)
        found = RejectedFasterLayout(
            place=place,
            strategy=e.strategy,
            faster=1 - e.time.step_seconds / best.time.step_seconds,
            chance=fit_probability(recipe, e.memory),
            peak_bytes=e.memory.peak_bytes,
            capacity_bytes=e.memory.capacity_bytes,
            needs=() if may_not_fit else tuple(sorted(complexity_features(e.strategy) - mine)),
            # Both need each rank to have the whole model.
            unavailable_features=(ACCELERATE_FILES, "LoRA")
            if best.strategy.has_full_model_per_rank and not e.strategy.has_full_model_per_rank
            else (),
        )
        fastest.setdefault(may_not_fit, found)
    return tuple(fastest[reason] for reason in (True, False) if reason in fastest)
