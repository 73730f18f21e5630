"""What `explain` and `diff` look at: a recipe, or a compiled folder, which has all that it takes in its own files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir.cluster import Cluster
    from shardwright.ir.model_graph import ModelGraph
    from shardwright.ir.recipe import DataSection, Recipe
    from shardwright.layout.estimate import Estimate
    from shardwright.plan.plan import Plan, PlanData

PREDICTION_NOISE = 1e-6  # of the step time: what another machine's floating point may differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """estimate: of the chosen layout, by this version's cost model. plan: where it is a compiled folder."""

    name: str
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    estimate: Estimate
    plan: Plan | None

    @property
    def is_predicted_anew(self) -> bool:
        """The plan's own prediction is another one: it was compiled by another version of the cost model."""
        if self.plan is None:
            return False
        then, now = self.plan.predicted, self.estimate
        seconds = abs(then.time.step_seconds - now.time.step_seconds)
        return seconds > PREDICTION_NOISE * now.time.step_seconds or then.memory.peak_bytes != now.memory.peak_bytes


def read_subject(name: str, overrides: Sequence[str] = ()) -> Subject:
    """Raises Refusal: SW3301, SW3302 for a folder that is none of ours, and all that a recipe can be refused for."""
    return read_folder(name) if os.path.isdir(name) else read_recipe(name, overrides)


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Subject:
    from shardwright.cli.estimate import model_and_cluster
    from shardwright.diagnostics import Refusal
    from shardwright.recipe.load import load_recipe

    recipe = load_recipe(Path(name), overrides)
    graph, cluster = model_and_cluster(recipe)
    from shardwright.search.deadline import size_cluster
    from shardwright.search.search import pinned_estimate

    try:
        recipe, cluster, _ = size_cluster(recipe, graph, cluster)
        estimate = pinned_estimate(recipe, graph, cluster)
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source or recipe.source) from None
    return Subject(name=name, recipe=recipe, graph=graph, cluster=cluster, estimate=estimate, plan=None)


def read_folder(name: str) -> Subject:
    """No network, no torch: the folder has the model's graph beside the plan."""
    from shardwright.cluster.resolve import resolve_cluster
    from shardwright.diagnostics import Diagnostic, Refusal
    from shardwright.plan.graph_file import GRAPH_FILE, read_graph
    from shardwright.plan.serialize import read_plan
    from shardwright.recipe.load import load_recipe
    from shardwright.search.settle import estimate_strategy

    folder = Path(name)
    if not (folder / "plan.json").is_file():
        raise Refusal(
            Diagnostic(
                code="SW3301",
                message=f"{name!r} is not a compiled folder: it has no plan.json",
                help="Give a folder that `shardwright compile` wrote, or a recipe file.",
            )
        )
    try:
        plan, graph = read_plan(folder), read_graph(folder)
    except (OSError, ValueError) as error:
        raise Refusal(
            Diagnostic(
                code="SW3302",
                message=f"plan.json or {GRAPH_FILE} of {name!r} cannot be read: {str(error).splitlines()[0]}",
                help="It was written by another version, or changed since. Compile its recipe again: "
                f"`shardwright compile {name}/recipe.resolved.json -o {name}`.",
            )
        ) from None
    recipe = _as_compiled(load_recipe(folder / "recipe.resolved.json"), plan)
    cluster = resolve_cluster(recipe.cluster)
    estimate = estimate_strategy(recipe, graph, cluster, plan.strategy)
    return Subject(name=name, recipe=recipe, graph=graph, cluster=cluster, estimate=estimate, plan=plan)


def _as_compiled(recipe: Recipe, plan: Plan) -> Recipe:
    """`nodes: auto` was settled by the compile, and relative paths start where the recipe lay then."""
    held_out = recipe.validation
    if held_out is not None and held_out.data is not None and plan.validation is not None and plan.validation.data:
        held_out = dataclasses.replace(held_out, data=_with_paths(held_out.data, plan.validation.data))
    return dataclasses.replace(
        recipe,
        cluster=dataclasses.replace(recipe.cluster, nodes=plan.nodes),
        data=None if recipe.data is None else _with_paths(recipe.data, plan.data),
        validation=held_out,
    )


def _with_paths(data: DataSection, plan: PlanData) -> DataSection:
    parts = tuple(_with_paths(*each) for each in zip(data.mixture, plan.mixture, strict=True))
    return dataclasses.replace(data, path=plan.path, mixture=parts)
