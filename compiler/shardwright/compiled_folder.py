"""The one reader of a compiled folder: the plan, and the model and recipe that it came from.

plan.json has every decision and prediction. How its step runs and what else the search saw are not
in there: both are computed again from recipe.resolved.json and model_graph.json, by the planner's
own functions: no torch, no network.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from shardwright.cluster.cluster_types import Cluster
from shardwright.cluster.gpu_catalogue import resolve_cluster
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Refusal, refusal
from shardwright.engines.engine_table import engine_of, recipe_for_engine
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph, config_sha256
from shardwright.models.model_graph_json import read_graph
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import load_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import (
    DataSection,
    Recipe,
    accumulation_dtype,
    with_resolved_kernels,
)
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.utils.strict_json import canonical_hash

RECIPE = "recipe.resolved.json"
STEP_SECONDS_TOLERANCE = 1e-9
"""Relative, of the step time: the same formulas give the same figures but for the last digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFolder:
    """layout, estimate: the plan's strategy and placing, priced again by this version's cost
    model."""

    folder: Path
    plan: Plan
    recipe: Recipe
    layout: PricedLayout
    estimate: Estimate

    @property
    def graph(self) -> ModelGraph:
        return self.layout.graph

    @property
    def cluster(self) -> Cluster:
        return self.layout.cluster

    @property
    def has_stale_prediction(self) -> bool:
        """The plan's own prediction is another one: it was compiled by another version of the cost
        model."""
        then, now = self.plan.predicted, self.estimate
        steps = (then.time.step_seconds, now.time.step_seconds)
        return (
            then.memory != now.memory
            or abs(steps[0] - steps[1]) > STEP_SECONDS_TOLERANCE * steps[0]
        )


def read_folder(folder: Path) -> CompiledFolder:
    """Errors: SW6001 no compiled folder; SW3321, SW3322 its recipe or model is not the plan's;
    those of the recipe."""
    plan = load_plan(folder)
    recipe = _recipe(folder, plan)
    graph = _graph(folder, plan)
    cluster = resolve_cluster(recipe.cluster)
    layout, estimate = price_planned_layout(
        Problem(recipe=recipe, graph=graph, cluster=cluster), plan.strategy, plan.boundaries
    )
    return CompiledFolder(folder=folder, plan=plan, recipe=recipe, layout=layout, estimate=estimate)


def _recipe(folder: Path, plan: Plan) -> Recipe:
    path = folder / RECIPE
    if not path.is_file():
        raise _mismatch("SW3321", f"{str(folder)!r} has no {RECIPE}")
    recipe = load_recipe(path)
    if canonical_hash(recipe.document) != plan.recipe_hash:
        raise _mismatch(
            "SW3321", f"{str(path)!r} is not the recipe that plan.json was compiled from"
        )
    # What was auto of the engine, the nodes, every_steps and the sums was settled by the compile;
    # relative paths start where the recipe lay.
    held_out = recipe.validation
    if (
        held_out is not None
        and held_out.data is not None
        and plan.validation is not None
        and plan.validation.data
    ):
        held_out = dataclasses.replace(
            held_out, data=_with_plan_paths(held_out.data, plan.validation.data)
        )
    training = recipe.training
    if plan.training.gradient_accumulation_dtype != accumulation_dtype(training):
        dtype = plan.training.gradient_accumulation_dtype
        training = dataclasses.replace(training, gradient_accumulation_dtype=dtype)
    return dataclasses.replace(
        with_resolved_kernels(recipe_for_engine(recipe, engine_of(plan)), plan.model.kernels),
        training=training,
        cluster=dataclasses.replace(recipe.cluster, nodes=plan.nodes),
        checkpoint=dataclasses.replace(recipe.checkpoint, every_steps=plan.checkpoint.every_steps),
        data=None if recipe.data is None else _with_plan_paths(recipe.data, plan.data),
        validation=held_out,
    )


def _with_plan_paths(data: DataSection, plan: DataSection) -> DataSection:
    parts = tuple(_with_plan_paths(*each) for each in zip(data.mixture, plan.mixture, strict=True))
    return dataclasses.replace(data, path=plan.path, mixture=parts)


def _graph(folder: Path, plan: Plan) -> ModelGraph:
    """As `compile` left it in the folder: nothing is traced, so no torch and no code of the model's
    own."""
    try:
        graph = read_graph(folder)
        config = json.loads((folder / plan.model.config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:200]
        raise _mismatch("SW3322", f"the model of {str(folder)!r} cannot be read: {cause}") from None
    hashes = (graph.config_hash, config_sha256(graph.config), config_sha256(config))
    if any(each != plan.model.config_hash for each in hashes):
        raise _mismatch(
            "SW3322", f"the model of {str(folder)!r} is not the one that plan.json was compiled for"
        )
    return graph


def _mismatch(code: str, message: str) -> Refusal:
    help = (
        "Compile the folder again: `shardwright compile RECIPE -o DIR` keeps its run and "
        "checkpoints."
    )
    return refusal(code, message, help)
