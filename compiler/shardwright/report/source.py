"""What a report is about, read from the compiled folder alone: the plan, and the model and recipe that it came from.

plan.json has every decision and prediction. How its step runs and what else the search saw are not in there: both are
computed again from recipe.resolved.json and model/config.json, by the planner's own functions, without a network.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shardwright.cluster.resolve import resolve_cluster
from shardwright.cost.estimate import price_layout, weigh
from shardwright.cost.layout import Layout
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.estimate import Estimate
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.model.build import build_model_graph
from shardwright.model.popular.shipped import shipped_config
from shardwright.plan.build import MODEL_DIRECTORY, canonical_hash
from shardwright.plan.plan import Plan
from shardwright.recipe.load import load_recipe
from shardwright.rules.registry import check_layout
from shardwright.runtime.launcher import load_plan

RECIPE = "recipe.resolved.json"
SAME = 1e-9
"""Relative: the same formulas give the same figures but for the last digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """layout, estimate: the plan's strategy, placed and priced again by this version's cost model."""

    folder: Path
    plan: Plan
    recipe: Recipe
    layout: Layout
    estimate: Estimate

    @property
    def graph(self) -> ModelGraph:
        return self.layout.graph

    @property
    def is_same(self) -> bool:
        """Whether this version's cost model says of the plan what the plan says of itself."""
        told, now = self.plan.predicted, self.estimate
        steps = (told.time.step_seconds, now.time.step_seconds)
        return told.memory == now.memory and abs(steps[0] - steps[1]) <= SAME * steps[0]


def read_subject(folder: Path) -> Subject:
    """Errors: SW6001 no compiled folder; SW3321, SW3322 its recipe or model is not the plan's; those of the recipe."""
    plan = load_plan(folder)
    recipe = _recipe(folder, plan)
    graph = _graph(folder, plan, recipe)
    cluster = resolve_cluster(recipe.cluster)
    diagnostics = check_layout(recipe, graph, cluster, plan.strategy)
    layout, memory = weigh(recipe, graph, cluster, plan.strategy)
    return Subject(
        folder=folder,
        plan=plan,
        recipe=recipe,
        layout=layout,
        estimate=price_layout(layout, memory, diagnostics),
    )


def _recipe(folder: Path, plan: Plan) -> Recipe:
    path = folder / RECIPE
    if not path.is_file():
        raise _foreign("SW3321", f"{str(folder)!r} has no {RECIPE}")
    recipe = load_recipe(path)
    if canonical_hash(recipe.document) != plan.recipe_hash:
        raise _foreign("SW3321", f"{str(path)!r} is not the recipe that plan.json was compiled from")
    # `nodes: auto` was settled by the compile.
    return dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, nodes=plan.nodes))


def _graph(folder: Path, plan: Plan, recipe: Recipe) -> ModelGraph:
    """Of the recipe's own configuration, of a shipped one that is the plan's, or of the folder's."""
    section, here = recipe.model, str((folder / MODEL_DIRECTORY).resolve())
    if section.config is None:
        if section.revision == "main" and shipped_config(section.source or "") is not None:
            graph = build_model_graph(section)
            if graph.config_hash == plan.model.config_hash:
                return graph
        if plan.model.own_code is not None:
            from shardwright.hf.own_code import register

            register(folder / MODEL_DIRECTORY, plan.model.own_code)
        section = dataclasses.replace(section, source=here, trust_remote_code=None)
    graph = build_model_graph(section)
    if graph.config_hash != plan.model.config_hash:
        raise _foreign("SW3322", f"the model of {str(folder)!r} is not the one that plan.json was compiled for")
    return graph


def _foreign(code: str, message: str) -> Refusal:
    help = "Compile the folder again: `shardwright compile RECIPE -o DIR` keeps its run and checkpoints."
    return Refusal(Diagnostic(code=code, message=message, help=help))
