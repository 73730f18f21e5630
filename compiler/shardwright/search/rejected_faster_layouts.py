"""Faster layouts that rank behind the best one: what may not fit, and what has more moving parts
for too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cost.prediction_errors import bench
from shardwright.layout.layout import Strategy
from shardwright.layout.layout_estimate import Estimate
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.ranking_penalties import (
    SURE,
    chance_of_fitting,
    expected_seconds,
    moving_parts,
)

FOR_SCRIPTS = "accelerate/ (its settings for the Hugging Face Trainer and Accelerate)"
WORTH_A_LINE = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """place: in the ranking, from 1. faster: 1 less its step over the best one's. chance: of
    fitting; it is why, where `needs` is empty. needs: the parts that it has and the best layout has
    not, which are why otherwise. gives_up: what a run with it cannot have, and with the best layout
    can."""

    place: int
    strategy: Strategy
    faster: float
    chance: float
    peak_bytes: int
    capacity_bytes: int
    needs: tuple[str, ...]
    gives_up: tuple[str, ...]


def set_aside(recipe: Recipe, ranked: Sequence[Estimate]) -> tuple[SetAside, ...]:
    """The fastest of each reason, memory's first. None where memory itself is the objective."""
    if not ranked or recipe.objective == "memory":
        return ()
    best = ranked[0]
    mine, most = moving_parts(best.strategy), best.time.step_seconds * (1 - WORTH_A_LINE)
    fastest: dict[bool, SetAside] = {}
    behind = [(e, place) for place, e in enumerate(ranked, start=1) if e.time.step_seconds < most]
    for e, place in sorted(behind, key=lambda each: each[0].time.step_seconds):
        may_not_fit = expected_seconds(recipe, e) >= expected_seconds(recipe, best)
        found = SetAside(
            place=place,
            strategy=e.strategy,
            faster=1 - e.time.step_seconds / best.time.step_seconds,
            chance=chance_of_fitting(recipe, e.memory),
            peak_bytes=e.memory.peak_bytes,
            capacity_bytes=e.memory.capacity_bytes,
            needs=() if may_not_fit else tuple(sorted(moving_parts(e.strategy) - mine)),
            # Both need each rank to have the whole model.
            gives_up=(FOR_SCRIPTS, "LoRA")
            if best.strategy.is_whole and not e.strategy.is_whole
            else (),
        )
        fastest.setdefault(may_not_fit, found)
    return tuple(fastest[reason] for reason in (True, False) if reason in fastest)


def set_aside_words(found: SetAside) -> str:
    what = found.strategy.describe()
    if not found.needs:
        return f"{what} would be {found.faster:.1%} faster, but {chance_words(found)}"
    lost = f"; it gives up {' and '.join(found.gives_up)}" if found.gives_up else ""
    return f"{what} is {found.faster:.1%} faster, but {parts_words(found.needs)}{lost}"


def chance_words(found: SetAside) -> str:
    return (
        f"needs {found.peak_bytes / 2**30:.1f} of {found.capacity_bytes / 2**30:.0f} GiB and fits "
        f"with a chance of {found.chance:.0%} ({SURE:.0%} has no price)"
    )


def parts_words(needs: Sequence[str]) -> str:
    error = f"within the prediction's error, {bench().time.error:.1%} for each part"
    return f"needs {' and '.join(needs)}, {error}"
