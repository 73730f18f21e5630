"""Define Problem: what layouts are searched and priced for."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.layout.gpu_cluster import Cluster
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Hold the recipe (pins included), the model's graph and the cluster."""

    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
