"""Choose the engine of `target: auto` by its best plan, and compare any plan with another
engine's."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, cast

from shardwright.diagnostics import Refusal, found
from shardwright.engines.engine_definition import Engine
from shardwright.engines.engine_table import AUTO_TARGET, ENGINES, engines_for, recipe_for_engine
from shardwright.layout.axes import AXES
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe, with_resolved_kernels
from shardwright.search.accumulation_dtype_choice import resolve_nodes_and_accumulation_dtype
from shardwright.search.cluster_sizing import ClusterSizing
from shardwright.search.forked_call import ForkedCall
from shardwright.search.kernel_choice import resolve_kernels
from shardwright.search.layout_comparison import because
from shardwright.search.layout_search import best_layout, rank_key, search
from shardwright.search.training_rules import engine_recipe_errors
from shardwright.utils.json_values import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """Compares the best layout under another engine with the chosen one. slower: its step over
    the chosen one's, less 1. because: why the one that ranks lower does. chosen: the plan's
    engine; automatic: the compiler chose it."""

    target: str
    chosen: str
    automatic: bool
    strategy: Layout
    step_seconds: float
    peak_bytes: int
    slower: float
    wins: bool
    because: str


def resolve_problem(problem: Problem) -> tuple[Problem, ClusterSizing | None]:
    """Resolve what the recipe leaves open before a layout is chosen: engine, kernels, number of
    nodes, gradient accumulation dtype.

    Returns the sizing too; None where the recipe gives the nodes. Raises what size_cluster
    raises; with `target: auto` and no engine that works, what the default engine raises.
    """
    if problem.recipe.target != AUTO_TARGET:
        return resolve_kernels(problem, resolve_nodes_and_accumulation_dtype)
    resolved: list[tuple[Problem, ClusterSizing | None]] = []
    refused: list[Refusal] = []
    first, *others = engines_for(AUTO_TARGET)
    for engine in (first, *(e for e in others if _engine_supports(e, problem))):
        try:
            resolved.append(
                resolve_kernels(_for_engine(problem, engine), resolve_nodes_and_accumulation_dtype)
            )
        except Refusal as refusal:
            refused.append(refusal)
    if not resolved:
        raise refused[0]
    return min(resolved, key=lambda each: _engine_rank(each[0]))


def problem_under_engine(problem: Problem, target: str) -> Problem:
    """Return the problem under the engine that a question names, with the choices for the plan's
    engine undone. Raises Refusal for a recipe or a model that the engine does not support."""
    engine = ENGINES[target]
    other = _for_engine(_with_auto_restored(problem), engine)
    wrong = engine_recipe_errors(engine, other.recipe)
    unsupported_reason = engine.unsupported_reason(problem.graph)
    if unsupported_reason:
        wrong = (
            *wrong,
            found(
                "SW2051", "target", f"target: {target} {unsupported_reason}", "Use another target."
            ),
        )
    if wrong:
        raise Refusal(*wrong)
    return other


_STARTED: list[tuple[Problem, ForkedCall[list[tuple[str, Estimate]]]]] = []
"""Holds the comparison that runs already for the next call of `other_engine`; at most one."""


def start_engine_comparison(problem: Problem) -> None:
    """Start the search that `other_engine` needs, where it is known before the problem is
    resolved. It takes as long as the search for the plan itself."""
    is_settled = problem.recipe.target != AUTO_TARGET and problem.recipe.cluster.nodes is not None
    if is_settled and _compares_engines(problem):
        reopened = _with_auto_restored(problem)
        _STARTED[:] = [(reopened, ForkedCall(functools.partial(_best_layouts, reopened)))]


def other_engine(problem: Problem, chosen: Estimate) -> OtherEngine | None:
    """Return the best layout under any other engine. None where no other engine supports the
    recipe and the model, none of its layouts runs, or the figures are not of this project's own
    run on GPUs. problem: resolved."""
    recipe = problem.recipe
    if not _compares_engines(problem):
        return None
    reopened = _with_auto_restored(problem)
    begun, _STARTED[:] = list(_STARTED), []
    bests = begun[0][1].result() if begun and begun[0][0] == reopened else _best_layouts(reopened)
    if not bests:
        return None
    target, best = min(bests, key=lambda each: rank_key(recipe, each[1]))
    wins = rank_key(recipe, best) < rank_key(recipe, chosen)
    return OtherEngine(
        target=target,
        chosen=recipe.target,
        automatic=recipe.document.get("target") == AUTO_TARGET,
        strategy=best.strategy,
        step_seconds=best.time.step_seconds,
        peak_bytes=best.memory.peak_bytes,
        slower=best.time.step_seconds / chosen.time.step_seconds - 1,
        wins=wins,
        because=because(recipe, chosen, best) if wins else because(recipe, best, chosen),
    )


def uncompared_engines_reason(problem: Problem) -> str:
    """Return why `other_engine` gives None for this resolved problem."""
    recipe = problem.recipe
    if problem.cluster.gpu.is_cpu:
        return "engines are compared on GPUs only"
    if not ENGINES[recipe.target].automatic:
        return f"target: {recipe.target} stands alone"
    if recipe.cluster.measured is not None:
        return f"cluster.measured holds figures of {recipe.target} alone"
    if not _compares_engines(problem):
        return f"the recipe's assume section describes {recipe.target} alone"
    reopened, reasons = _with_auto_restored(problem), []
    for engine in engines_for(AUTO_TARGET):
        if engine.name == recipe.target:
            continue
        errors = engine_recipe_errors(engine, recipe_for_engine(reopened.recipe, engine))
        reason = engine.unsupported_reason(problem.graph)
        reason = reason or ("" if errors else "has no layout that runs")
        reasons.append(f"{engine.name} {reason}" if reason else errors[0].message)
    return "; ".join(reasons)


def _compares_engines(problem: Problem) -> bool:
    recipe = problem.recipe
    own = recipe.is_own_run and recipe.assume.mfu is None and recipe.cluster.measured is None
    return own and not problem.cluster.gpu.is_cpu and ENGINES[recipe.target].automatic


def _best_layouts(reopened: Problem) -> list[tuple[str, Estimate]]:
    """Return the best layout of each other engine that supports the recipe and the model."""
    others = [
        e
        for e in engines_for(AUTO_TARGET)
        if e.name != reopened.recipe.target and _engine_supports(e, reopened)
    ]
    return [
        (e.name, best)
        for e in others
        if (best := best_layout(_for_engine(reopened, e))) is not None
    ]


def _for_engine(problem: Problem, engine: Engine) -> Problem:
    """Return the problem for this engine; where the recipe names another one, without pins of
    axes that this engine lacks."""
    recipe = problem.recipe
    if recipe.target not in (AUTO_TARGET, engine.name):
        lacking: dict[str, Any] = {
            a.name: a.off_value
            for a in AXES
            if a.section and not a.in_every_engine and a.name not in engine.axes
        }
        recipe = dataclasses.replace(
            recipe, parallelism=dataclasses.replace(recipe.parallelism, **lacking)
        )
    return dataclasses.replace(problem, recipe=recipe_for_engine(recipe, engine))


def _engine_supports(engine: Engine, problem: Problem) -> bool:
    return not engine.unsupported_reason(problem.graph) and not engine_recipe_errors(
        engine, recipe_for_engine(problem.recipe, engine)
    )


def _with_auto_restored(problem: Problem) -> Problem:
    """Return the problem with the choices for one engine undone: gradients summed in fp32,
    Hugging Face's kernels."""
    recipe = problem.recipe
    if _recipe_value(recipe, "training", "gradient_accumulation_dtype") is None:
        training = dataclasses.replace(recipe.training, gradient_accumulation_dtype=None)
        recipe = dataclasses.replace(recipe, training=training)
    if _recipe_value(recipe, "model", "kernels") is None and recipe.model.kernels == "compile":
        recipe = with_resolved_kernels(recipe, "hf")
    return dataclasses.replace(problem, recipe=recipe)


def _recipe_value(recipe: Recipe, section: str, key: str) -> object:
    """Return the recipe's value; None where it says auto, or nothing."""
    value = cast(JsonObject, recipe.document.get(section, {})).get(key, AUTO_TARGET)
    return None if value == AUTO_TARGET else value


def _engine_rank(problem: Problem) -> tuple[int, bool, tuple[float | int | str, ...]]:
    """Order by fewer nodes, then as a ranking does; an engine without a layout comes last."""
    ranked = search(problem).ranked
    return problem.cluster.nodes, not ranked, rank_key(problem.recipe, ranked[0]) if ranked else ()
