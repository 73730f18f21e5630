"""How a checkpoint of one run resumes under another: `diff` tells it beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwright.checkpoint.checkpoint_compatibility import (
    SHARDING_KEYS,
    Compatibility,
    ResumeRequirements,
    compare_requirements,
)
from shardwright.layout.layout import Layout
from shardwright.layout.zero_settings import HPZ
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonObject

BIT_FOR_BIT, SAME_RANKS, CONVERTED, NO = "bit for bit", "same ranks", "converted", "no"
# Keys that change when bytes move, and no number.
_TRAFFIC_ONLY_KEYS = ("hpz_partition_size",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSide:
    """attention: as the model runs it. versions: what it is compiled with."""

    recipe: Recipe
    facts: ResumeRequirements
    attention: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeVerdict:
    """verdict: bit for bit (the run goes on as if nothing had happened), same ranks (each rank
    loads its own files), converted (the state is cut anew as it is loaded, by itself), no. notes:
    what else the resumed run would notice."""

    verdict: str
    how: str
    notes: tuple[str, ...]


def resume_verdict_of(a: ResumeSide, b: ResumeSide) -> ResumeVerdict:
    """Of a checkpoint that `a` wrote, under `b`."""
    answer = compare_requirements(a.facts, b.facts)
    if answer.refused:
        return ResumeVerdict(
            verdict=NO, how=f"{_refused(answer)}; `shardwright export` gives its weights", notes=()
        )
    notes = (*_islands(a.recipe, b.recipe), *_samples(answer), *_settings(a.recipe, b.recipe))
    if answer.layout:
        changed = ", ".join(each.key for each in answer.layout)
        how = (
            "`run` cuts weights and optimizer states anew as it loads them, by itself; what "
            f"differs: {changed}"
        )
        return ResumeVerdict(verdict=CONVERTED, how=how, notes=notes)
    ours, theirs = a.facts.strategy, b.facts.strategy
    order = [k for k in _compute_keys(ours) if getattr(ours, k) != getattr(theirs, k)]
    order += ["attention"] * (a.attention != b.attention) + ["extra"] * (
        _extra(a.recipe) != _extra(b.recipe)
    )
    if order or notes or a.versions != b.versions:
        why = ", ".join(order) or ("what is noted" if notes else "the versions")
        how = f"each rank loads its own files; sums may round differently ({why})"
        return ResumeVerdict(verdict=SAME_RANKS, how=how, notes=notes)
    return ResumeVerdict(
        verdict=BIT_FOR_BIT, how="the layout is the same: each rank loads its own files", notes=()
    )


def _refused(answer: Compatibility) -> str:
    if answer.refused == "adapters":
        return answer.why
    return f"the {answer.refused} is another one ({answer.why})"


def _compute_keys(strategy: Layout) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in fields(strategy)
        if field.name not in (*SHARDING_KEYS, *_TRAFFIC_ONLY_KEYS)
    )


def _extra(recipe: Recipe) -> JsonObject:
    """Without what changes no number."""
    zero = recipe.extra.get("zero_optimization")
    if not isinstance(zero, dict):
        return recipe.extra
    kept: JsonObject = {key: value for key, value in zero.items() if key != HPZ}
    rest: JsonObject = {
        key: value for key, value in recipe.extra.items() if key != "zero_optimization"
    }
    return {**rest, "zero_optimization": kept} if kept else rest


def _islands(a: Recipe, b: Recipe) -> tuple[str, ...]:
    """Folders of one world and of islands lie beside each other: docs/islands.md."""
    ours, theirs = a.cluster.islands, b.cluster.islands
    if ours == theirs or min(ours, theirs) > 1:
        return ()
    which = "the newest one after an outer step" if ours > 1 else "the newest one, on each island"
    return (f"with --resume PATH: {which}; without it `run` names it and stops (SW6218)",)


def _samples(answer: Compatibility) -> tuple[str, ...]:
    if not answer.samples:
        return ()
    changed = ", ".join(each.key for each in answer.samples)
    return (
        f"the samples come in another order ({changed}): some may be seen twice, some not at all",
    )


def _settings(a: Recipe, b: Recipe) -> tuple[str, ...]:
    """The optimizer's settings and the learning rate's curve are the new recipe's, from the next
    step on."""
    names = (
        "optimizer",
        "scheduler",
        "gradient_clipping",
        "gradient_accumulation_dtype",
        "steps",
        "tokens",
        "epochs",
    )
    changed = [f"training.{k}" for k in names if getattr(a.training, k) != getattr(b.training, k)]
    if a.lora is not None and b.lora is not None and a.lora.dropout != b.lora.dropout:
        changed.append("lora.dropout")
    return (
        (f"from the resumed step on these are the new ones: {', '.join(changed)}",)
        if changed
        else ()
    )
