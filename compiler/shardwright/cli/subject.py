"""What `explain` and `diff` look at: a recipe, or a compiled folder, which has all that it takes in its own files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir.cluster import Cluster
    from shardwright.ir.model_graph import ModelGraph
    from shardwright.ir.recipe import Recipe
    from shardwright.layout.estimate import Estimate
    from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRecipe:
    """estimate: of the chosen layout, by this version's cost model. plan: where it is a compiled folder.
    is_predicted_anew: the plan's own prediction is another one."""

    name: str
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    estimate: Estimate
    plan: Plan | None
    is_predicted_anew: bool


def read_subject(name: str, overrides: Sequence[str] = ()) -> PricedRecipe:
    """Raises Refusal: read_folder's, and all that a recipe can be refused for."""
    return _folder(name) if os.path.isdir(name) else read_recipe(name, overrides)


def read_recipe(name: str, overrides: Sequence[str] = ()) -> PricedRecipe:
    from shardwright.compile import estimate_recipe
    from shardwright.recipe.load import load_recipe

    problem, estimate = estimate_recipe(load_recipe(Path(name), overrides))
    return PricedRecipe(
        name=name,
        recipe=problem.recipe,
        graph=problem.graph,
        cluster=problem.cluster,
        estimate=estimate,
        plan=None,
        is_predicted_anew=False,
    )


def _folder(name: str) -> PricedRecipe:
    from shardwright.folder import read_folder

    read = read_folder(Path(name))
    return PricedRecipe(
        name=name,
        recipe=read.recipe,
        graph=read.graph,
        cluster=read.cluster,
        estimate=read.estimate,
        plan=read.plan,
        is_predicted_anew=read.is_predicted_anew,
    )
