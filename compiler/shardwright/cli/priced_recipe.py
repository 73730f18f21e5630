"""What `explain` and `diff` look at: a recipe, or a compiled folder, which has all that it takes in
its own files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.utils.json_records import copy_shared_fields

if TYPE_CHECKING:
    from shardwright.cluster.gpu_catalogue import Cluster
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.models.model_graph import ModelGraph
    from shardwright.monitor.run_files import SaveStatistics
    from shardwright.plan.plan import Plan
    from shardwright.recipe.recipe_types import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRecipe:
    """estimate: of the chosen layout, by this version's cost model. plan: where it is a compiled
    folder. has_stale_prediction: the plan's own prediction is another one. saves: of the folder's
    run."""

    name: str
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    estimate: Estimate
    plan: Plan | None
    has_stale_prediction: bool
    saves: SaveStatistics | None = None


def read_priced_recipe(name: str, overrides: Sequence[str] = ()) -> PricedRecipe:
    """Raises Refusal: read_folder's, and all that a recipe can be refused for."""
    if os.path.isdir(name):
        from shardwright.compiled_folder import read_folder
        from shardwright.monitor.run_files import read_save_statistics

        return copy_shared_fields(
            PricedRecipe, read_folder(Path(name)), name=name, saves=read_save_statistics(Path(name))
        )
    from shardwright.compile import estimate_recipe
    from shardwright.recipe.recipe_loader import load_recipe

    problem, estimate = estimate_recipe(load_recipe(Path(name), overrides))
    return copy_shared_fields(
        PricedRecipe,
        problem,
        name=name,
        estimate=estimate,
        plan=None,
        has_stale_prediction=False,
        saves=None,
    )
