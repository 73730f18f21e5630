"""The compile: one tuple of stages, each from frozen input to frozen output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwright.cluster.resolve import resolve_cluster
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.cluster import Cluster
from shardwright.ir.estimate import Estimate
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.partition import StagePartition, TensorParallelMap
from shardwright.ir.recipe import Recipe
from shardwright.lower.inputs import copied_inputs
from shardwright.lower.launch import check_launch
from shardwright.lower.lower import lower
from shardwright.model.graph import build_model_graph
from shardwright.partition.stages import partition_stages
from shardwright.partition.tensor import tensor_parallel_map
from shardwright.plan.build import build_plan, installed_versions
from shardwright.plan.plan import Plan
from shardwright.recipe.files import check_files
from shardwright.rules.executable import check_executable
from shardwright.search.search import choose

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """files: path relative to the compiled folder -> content."""

    plan: Plan
    files: Mapping[str, bytes]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What is known so far; each stage fills in its own field."""

    recipe: Recipe
    graph: ModelGraph | None = None
    cluster: Cluster | None = None
    estimate: Estimate | None = None
    partition: StagePartition | None = None
    tensor_map: TensorParallelMap | None = None
    plan: Plan | None = None
    files: Mapping[str, bytes] | None = None

    def verify(self) -> None:
        for value in (self.graph, self.cluster, self.tensor_map, self.plan):
            if value is not None:
                value.verify()
        if self.graph is not None and self.partition is not None:
            self.partition.verify(len(self.graph.layers))


def _check(c: Compilation) -> Compilation:
    errors = (*check_executable(c.recipe), *check_files(c.recipe), *check_launch(c.recipe))
    if errors:
        raise Refusal(*errors)
    return c


def _model(c: Compilation) -> Compilation:
    return replace(c, graph=build_model_graph(c.recipe.model))


def _cluster(c: Compilation) -> Compilation:
    return replace(c, cluster=resolve_cluster(c.recipe.cluster))


def _search(c: Compilation) -> Compilation:
    return replace(c, estimate=choose(c.recipe, made(c.graph), made(c.cluster)))


def _partition(c: Compilation) -> Compilation:
    strategy = made(c.estimate).strategy
    return replace(
        c,
        partition=partition_stages(c.recipe, made(c.graph), strategy),
        tensor_map=tensor_parallel_map(made(c.graph), strategy.tensor),
    )


def _plan(c: Compilation) -> Compilation:
    plan = build_plan(
        c.recipe,
        made(c.graph),
        made(c.cluster),
        made(c.estimate),
        made(c.partition),
        made(c.tensor_map),
        installed_versions(),
    )
    return replace(c, plan=plan)


def _lower(c: Compilation) -> Compilation:
    files = lower(made(c.plan), c.recipe, made(c.graph))
    return replace(c, files={**files, **copied_inputs(c.recipe, made(c.cluster))})


Stage = Callable[[Compilation], Compilation]

# The order of the compile. The stages of one row do not need each other: all their errors are reported together.
STAGES: tuple[tuple[Stage, ...], ...] = (
    (_check, _model, _cluster),
    (_search,),
    (_partition,),
    (_plan,),
    (_lower,),
)


def compile_recipe(recipe: Recipe) -> Compiled:
    """Raises Refusal, with the recipe's source, where the recipe cannot become a run."""
    state = Compilation(recipe=recipe)
    for row in STAGES:
        errors: list[Diagnostic] = []
        for stage in row:
            try:
                state = stage(state)
            except Refusal as refusal:
                errors.extend(refusal.diagnostics)
            state.verify()
        if errors:
            errors.extend(_layout_errors(state, errors))
            raise Refusal(*errors, source=recipe.source)
    return Compiled(plan=made(state.plan), files=made(state.files), warnings=made(state.estimate).diagnostics)


def _layout_errors(state: Compilation, errors: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """A recipe refused for its data or launch section should hear of its layout too, once a key."""
    if state.graph is None or state.cluster is None or state.estimate is not None:
        return ()
    try:
        choose(state.recipe, state.graph, state.cluster)
    except Refusal as refusal:
        told = {d.key for d in errors}
        return tuple(d for d in refusal.diagnostics if d not in errors and d.key not in told)
    return ()


def made(value: T | None) -> T:
    """A field that an earlier stage has filled in."""
    if value is None:
        raise ValueError("a stage ran before the one that it needs")
    return value
