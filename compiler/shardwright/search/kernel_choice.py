"""Choose `model.kernels: auto`: torch.compile of the layers where it is verified and faster,
else Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from shardwright.diagnostics import Refusal
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import Kernels
from shardwright.recipe.recipe_types import with_resolved_kernels
from shardwright.search.cluster_sizing import ClusterSizing
from shardwright.search.layout_search import search, search_of_equal
from shardwright.search.ranking_penalties import penalized_seconds
from shardwright.utils.json_values import JsonObject

ResolvedProblem = tuple[Problem, ClusterSizing | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernels:
    """Says which kernels are used. seconds: the best layout's step; other_seconds: with the
    other kernels, None where no layout runs with them."""

    kernels: Kernels
    seconds: float
    other_seconds: float | None


def resolve_kernels(
    problem: Problem, resolve_rest: Callable[[Problem], ResolvedProblem]
) -> ResolvedProblem:
    """Choose by fewer nodes, then by the shorter step. resolve_rest: resolves what else is open.
    Raises what it raises for Hugging Face's modules, where torch.compile does not work either."""
    if problem.recipe.model.kernels != "auto":
        return resolve_rest(problem)
    compiled: ResolvedProblem | None
    try:
        compiled = resolve_rest(_with_kernels(problem, "compile"))
    except Refusal:
        compiled = None
    if compiled is None or not search(compiled[0]).ranked:
        return resolve_rest(_with_kernels(problem, "hf"))
    try:
        uncompiled = resolve_rest(_with_kernels(problem, "hf"))
    except Refusal:
        return compiled
    return min(uncompiled, compiled, key=_rank)


def chosen_kernels(problem: Problem) -> ChosenKernels | None:
    """Return the kernels chosen for a resolved problem; None where its recipe names them."""
    model = cast(JsonObject, problem.recipe.document["model"])
    ranked = search(problem).ranked
    if model.get("kernels") != "auto" or not ranked:
        return None
    taken: Kernels = "compile" if problem.recipe.model.kernels == "compile" else "hf"
    other_kernels = _with_kernels(problem, "hf" if taken == "compile" else "compile")
    others = search_of_equal(other_kernels).ranked
    other = others[0].time.step_seconds if others else None
    return ChosenKernels(kernels=taken, seconds=ranked[0].time.step_seconds, other_seconds=other)


def _with_kernels(problem: Problem, kernels: Kernels) -> Problem:
    return Problem(
        recipe=with_resolved_kernels(problem.recipe, kernels),
        graph=problem.graph,
        cluster=problem.cluster,
    )


def _rank(resolved: ResolvedProblem) -> tuple[int, float]:
    problem, _ = resolved
    ranked = search(problem).ranked
    return problem.cluster.nodes, penalized_seconds(problem.recipe, ranked[0]) if ranked else float(
        "inf"
    )
