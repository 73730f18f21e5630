"""What `explain` and `diff` look at: a recipe, or a compiled folder, which has all that it takes in
its own files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.utils.json_records import carried

if TYPE_CHECKING:
    from shardwright.cluster.cluster_types import Cluster
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.models.model_graph import ModelGraph
    from shardwright.monitor.run_files import MeasuredSaves
    from shardwright.plan.plan import Plan
    from shardwright.recipe.recipe_types import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRecipe:
    """estimate: of the chosen layout, by this version's cost model. plan: where it is a compiled
    folder. is_predicted_anew: the plan's own prediction is another one. saves: of the folder's
    run."""

    name: str
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    estimate: Estimate
    plan: Plan | None
    is_predicted_anew: bool
    saves: MeasuredSaves | None = None


def read_subject(name: str, overrides: Sequence[str] = ()) -> PricedRecipe:
    """Raises Refusal: read_folder's, and all that a recipe can be refused for."""
    if os.path.isdir(name):
        from shardwright.compiled_folder import read_folder
        from shardwright.monitor.run_files import read_saves

        return carried(
            PricedRecipe, read_folder(Path(name)), name=name, saves=read_saves(Path(name))
        )
    from shardwright.compile import estimate_recipe
    from shardwright.recipe.recipe_loader import load_recipe

    problem, estimate = estimate_recipe(load_recipe(Path(name), overrides))
    return carried(
        PricedRecipe,
        problem,
        name=name,
        estimate=estimate,
        plan=None,
        is_predicted_anew=False,
        saves=None,
    )
