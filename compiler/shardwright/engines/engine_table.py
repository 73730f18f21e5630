"""List the engines, one row each: `target` in a recipe and in plan.json."""

from __future__ import annotations

import dataclasses
import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from shardwright.diagnostics import Diagnostic, found, refusal
from shardwright.engines.deepspeed.deepspeed_capabilities import DEEPSPEED
from shardwright.engines.engine_definition import Engine, EngineTraits, Lowering
from shardwright.engines.megatron.megatron_capabilities import MEGATRON
from shardwright.engines.reference.reference_capabilities import REFERENCE
from shardwright.engines.run_profiles import AssumedEngine, assumed_runs, kernel_profile
from shardwright.layout.axes import AXES
from shardwright.layout.layout import Candidate, Layout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.private_names import Purpose, private_name_errors

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (DEEPSPEED, REFERENCE, MEGATRON)}
DEFAULT_TARGET = DEEPSPEED.name
AUTO_TARGET = "auto"
"""Selects the engine whose best plan is faster."""


def engine_of(plan: Plan) -> Engine:
    """Return the plan's engine. Raises Refusal with SW6001 for an engine that this version
    lacks."""
    engine = ENGINES.get(plan.target)
    if engine is None:
        names = ", ".join(ENGINES)
        why = f"its plan.json has target: {plan.target}, and this version's engines are {names}"
        help = (
            "Compile the recipe again: `shardwright compile RECIPE -o DIR` keeps the folder's "
            "run and checkpoints."
        )
        raise refusal("SW6001", f"not a compiled folder of this version: {why}", help)
    return engine


def engines_for(target: str) -> tuple[Engine, ...]:
    """Return the engine that a recipe names, or those that `auto` chooses from, the default
    first."""
    return (
        tuple(e for e in ENGINES.values() if e.automatic)
        if target == AUTO_TARGET
        else (ENGINES[target],)
    )


def recipe_for_engine(recipe: Recipe, engine: Engine) -> Recipe:
    """Return the recipe for this engine.

    Keys at their default, which only some engines have and which leave each rank its part of the
    model, are left to the search: a recipe for any engine does not name them.
    """
    if recipe.target == engine.name:
        return recipe
    free: dict[str, Any] = {
        axis.name: None
        for axis in AXES
        if axis.values
        and axis.name in engine.axes
        and not (axis.in_every_engine or axis.ranks or axis.is_model_parallel)
        and axis.pin(recipe) == axis.default
    }
    pins = dataclasses.replace(recipe.parallelism, **free)
    return dataclasses.replace(recipe, target=engine.name, parallelism=pins)


def package_errors(engine: Engine) -> tuple[Diagnostic, ...]:
    """Return SW1923 for each package that the engine needs and that is missing or untested."""
    from importlib import metadata

    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    errors = []
    for name, tested in engine.packages.items():
        try:
            version = Version(metadata.version(name)).base_version
        except metadata.PackageNotFoundError:
            version = ""
        if version and SpecifierSet(tested).contains(version):
            continue
        have = f"{name} {version} was not tested" if version else f"{name} is not installed"
        instead = "" if engine.name == DEFAULT_TARGET else f", or write `target: {DEFAULT_TARGET}`"
        message = f"target: {engine.name} needs {name} {tested}, but {have}"
        errors.append(
            found(
                "SW1923",
                "target",
                message,
                f"pip install 'shardwright[{engine.extra}]'{instead}.",
            )
        )
    return tuple(errors)


def private_name_purposes(plan: Plan) -> tuple[Purpose, ...]:
    """Return which private names of other packages the plan's run needs."""
    engine = engine_of(plan)
    found: list[Purpose] = ["every model", *engine.private_names(plan)]
    if plan.model.task_traits.images_in_text:
        found.append("a vision-language model")
    if plan.lora is not None:
        found.append("LoRA")
    if plan.strategy.context > 1 and engine.types is None:
        found.append("context parallelism")
    return tuple(found)


def missing_name_errors(plan: Plan) -> tuple[Diagnostic, ...]:
    """Return SW1926 for private names that the run needs and installed packages lack."""
    return private_name_errors(*private_name_purposes(plan))


def lowering_of(target: str) -> Lowering:
    """Import the module that writes the engine's files."""
    return cast(Lowering, import_module(ENGINES[target].lowering))


def traits_of(target: str, kernels: str, s: Layout) -> EngineTraits:
    """Return the traits of the engine whose run is priced; kernels: as in `assume`."""
    alone = s.zero_stage == 0 and s.zero_world_size == 1
    engine = kernel_profile(kernels, "").engine_without_zero if alone else None
    return _traits(engine or target, kernels)


def norms_are_fused(problem: Problem, s: Layout) -> bool:
    """Return whether the ranks' linears contain the norms before them, as Transformer Engine's
    do."""
    choice = ENGINES[problem.recipe.target].transformer_engine
    x = Candidate(recipe=problem.recipe, graph=problem.graph, cluster=problem.cluster, strategy=s)
    return choice is not None and choice(x) != "off"


@functools.cache
def _traits(target: str, kernels: str) -> EngineTraits:
    return dataclasses.replace(
        ENGINES[target].traits, **_assumed_engine(target, kernels).get("traits", {})
    )


def _assumed_engine(target: str, kernels: str) -> AssumedEngine:
    return assumed_runs()["engines"].get(target, {}).get(kernels, {})


def engine_title(target: str, kernels: str) -> str:
    """Name the engine whose run is priced."""
    return _assumed_engine(target, kernels).get("title", ENGINES[target].title)


def engine_family(target: str, kernels: str) -> str:
    """Name the family of engines that are predicted alike, whose runs tell of one another."""
    own = assumed_runs()["families"].get(target, ENGINES[target].title)
    return _assumed_engine(target, kernels).get("family", own)
