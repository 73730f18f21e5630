"""A plainer layout that is as fast as the best one within the prediction's error, and what the best one gives up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cost.measured import bench
from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import Estimate
from shardwright.layout.strategy import Strategy
from shardwright.search.settle import is_roomy

FOR_SCRIPTS = "accelerate/ (its settings for the Hugging Face Trainer and Accelerate)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plainer:
    """place: in the ranking, from 1. slower: its step over the best one's, less 1. without: what of the best layout it
    does without. gives_up: what a run with the best layout cannot have, and with this one could."""

    place: int
    strategy: Strategy
    slower: float
    without: tuple[str, ...]
    gives_up: tuple[str, ...]


def plainer(recipe: Recipe, ranked: Sequence[Estimate]) -> Plainer | None:
    """The one with the least machinery, then the fastest; None where the best layout is as plain as any so near.

    Where the kind of layout was never measured, the error is that of those that were: it is no smaller.
    """
    if not ranked or recipe.objective == "memory":
        return None
    best = ranked[0]
    most = best.time.step_seconds * (1 + bench().time.error)
    mine = _machinery(best.strategy)
    near = [
        (len(_machinery(e.strategy)), place, e)
        for place, e in enumerate(ranked[1:], start=2)
        if e.time.step_seconds <= most
        and _machinery(e.strategy) < mine
        and is_roomy(recipe, e.memory) >= is_roomy(recipe, best.memory)
    ]
    if not near:
        return None
    _, place, found = min(near, key=lambda each: each[:2])
    return Plainer(
        place=place,
        strategy=found.strategy,
        slower=found.time.step_seconds / best.time.step_seconds - 1,
        without=tuple(sorted(mine - _machinery(found.strategy))),
        # Both need each rank to have the whole model.
        gives_up=(FOR_SCRIPTS, "LoRA") if found.strategy.is_whole and not best.strategy.is_whole else (),
    )


def plainer_words(found: Plainer) -> str:
    lost = f"; row 1 gives up {' and '.join(found.gives_up)}" if found.gives_up else ""
    return (
        f"{found.strategy.describe()} does without {' and '.join(found.without)} and is {found.slower:.1%} slower, "
        f"within the prediction's error, {bench().time.error:.1%} at best{lost}"
    )


def _machinery(s: Strategy) -> frozenset[str]:
    """What a layout has beyond data parallelism and ZeRO. hpZ is none: nobody chooses it, and nothing is lost by it."""
    return frozenset(axis.machinery.format(value) for axis, value in s.beyond_plain() if axis.machinery)
