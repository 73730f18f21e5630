"""What a layout is for. A stage that decides about layouts takes one, and the strategy."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cluster.gpu_catalogue import Cluster
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The recipe (its pins included), the model's graph and the cluster that stages 1 to 3 made of
    it.

    expert_matrices_are_modules: each matrix of an expert is a module of its own, as transformers 4
    had it; not where the runs are this project's, but of published ones."""

    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    expert_matrices_are_modules: bool = False
