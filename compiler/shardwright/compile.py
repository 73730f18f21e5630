"""The compile: one tuple of stages, each from frozen input to frozen output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardwright.cluster.resolve import resolve_cluster
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.deepspeed.autotp import AUTOTP_FILE, autotp_config
from shardwright.engines.deepspeed.extra import check_extra
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.own_code import OwnCode
from shardwright.ir.partition import StagePartition, TensorParallelMap
from shardwright.ir.recipe import Recipe
from shardwright.ir.weights import Weights
from shardwright.launchers.lower import check_launch, unseen_paths
from shardwright.layout.estimate import Estimate, PredictionError
from shardwright.lower.inputs import copied_inputs, model_companions
from shardwright.lower.lower import json_bytes, lower, sealed
from shardwright.model.build import build_model_graph
from shardwright.model.own_code import locate_own_code
from shardwright.model.popular.snapshot import locate_weights, tokenizer_folder
from shardwright.partition.tensor import tensor_parallel_map
from shardwright.plan.build import MODEL_DIRECTORY, build_plan, installed_versions
from shardwright.plan.plan import Plan
from shardwright.recipe.files import check_files
from shardwright.rules.executable import check_executable
from shardwright.search.deadline import size_cluster
from shardwright.search.search import choose

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """files: path relative to the compiled folder -> content. error: of plan.predicted."""

    plan: Plan
    files: Mapping[str, bytes]
    warnings: tuple[Diagnostic, ...]
    error: PredictionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What is known so far; each stage fills in its own field."""

    recipe: Recipe
    weights: Weights | None = None
    own_code: tuple[Path, OwnCode] | None = None
    graph: ModelGraph | None = None
    cluster: Cluster | None = None
    estimate: Estimate | None = None
    partition: StagePartition | None = None
    tensor_map: TensorParallelMap | None = None
    plan: Plan | None = None
    files: Mapping[str, bytes] | None = None
    warnings: tuple[Diagnostic, ...] = ()

    def verify(self) -> None:
        for value in (self.graph, self.cluster, self.tensor_map, self.plan):
            if value is not None:
                value.verify()
        if self.graph is not None and self.partition is not None:
            self.partition.verify(len(self.graph.layers))


def _check(c: Compilation) -> Compilation:
    recipe = c.recipe
    errors = (*check_executable(recipe), *check_files(recipe), *check_launch(recipe), *check_extra(recipe))
    if errors:
        raise Refusal(*errors)
    return c


def _weights(c: Compilation) -> Compilation:
    return replace(c, weights=locate_weights(c.recipe.model))


def _model(c: Compilation) -> Compilation:
    """The configuration is read beside the weights, so that both are of one commit."""
    section = c.recipe.model if c.weights is None else replace(c.recipe.model, source=c.weights.path)
    graph = build_model_graph(section)
    return replace(c, graph=graph, own_code=locate_own_code(section))


def _cluster(c: Compilation) -> Compilation:
    return replace(c, cluster=resolve_cluster(c.recipe.cluster))


def _size(c: Compilation) -> Compilation:
    """What depends on the number of nodes is checked once it is decided."""
    recipe, cluster, sizing = size_cluster(c.recipe, made(c.graph), made(c.cluster))
    sized = replace(c, recipe=recipe, cluster=cluster)
    return sized if sizing is None else _check(sized)


def _search(c: Compilation) -> Compilation:
    return replace(c, estimate=choose(c.recipe, made(c.graph), made(c.cluster)))


def _partition(c: Compilation) -> Compilation:
    chosen = made(c.estimate)
    return replace(
        c,
        partition=StagePartition(boundaries=chosen.boundaries, schedule=chosen.strategy.schedule),
        tensor_map=tensor_parallel_map(made(c.graph), chosen.strategy.tensor),
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
        c.weights,
        None if c.own_code is None else c.own_code[1],
    )
    return replace(c, plan=plan)


def _lower(c: Compilation) -> Compilation:
    files = lower(made(c.plan), c.recipe, made(c.graph))
    autotp = autotp_config(made(c.plan))
    warnings: tuple[Diagnostic, ...] = ()
    if isinstance(autotp, Diagnostic):
        warnings = (autotp,)
    elif autotp is not None:
        files[AUTOTP_FILE] = json_bytes(autotp)
    if c.own_code is not None:
        folder, code = c.own_code
        files |= {f"{MODEL_DIRECTORY}/{name}": (folder / name).read_bytes() for name, _ in code.files}
    files |= model_companions(made(c.plan))
    files |= copied_inputs(c.recipe, made(c.cluster), _tokenizer_folder(c))
    plan, files = sealed(made(c.plan), files)
    return replace(c, plan=plan, files=files, warnings=(*warnings, *unseen_paths(made(c.plan))))


def _tokenizer_folder(c: Compilation) -> Path | None:
    model = c.recipe.model
    names = [(key, part.tokenizer) for key, part in c.recipe.tokenized() if part.tokenizer not in (None, "byte")]
    if not names:
        return None
    key, name = (*names[0][0], "tokenizer"), str(names[0][1])
    if name != model.source:
        return tokenizer_folder(name, "main", key)
    # The model's own: of the commit that its weights are of.
    revision = c.weights.revision if c.weights is not None and c.weights.revision else model.revision
    return tokenizer_folder(name, revision, key)


Stage = Callable[[Compilation], Compilation]

# The order of the compile. The stages of one row do not need each other: all their errors are reported together.
STAGES: tuple[tuple[Stage, ...], ...] = (
    (_check, _weights, _model, _cluster),
    (_size,),
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
                errors.extend(d for d in refusal.diagnostics if d not in errors)
            state.verify()
        if errors:
            errors.extend(_layout_errors(state, errors))
            raise Refusal(*errors, source=recipe.source)
    estimate = made(state.estimate)
    return Compiled(
        plan=made(state.plan),
        files=made(state.files),
        warnings=(*estimate.diagnostics, *state.warnings),
        error=estimate.error,
    )


def _layout_errors(state: Compilation, errors: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """A recipe refused for its data or launch section should hear of its layout too, once a key."""
    if state.graph is None or state.cluster is None or state.estimate is not None:
        return ()
    if state.recipe.cluster.nodes is None:
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
