"""What a layout is for. A stage that decides about layouts takes one, and the strategy."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The recipe (its pins included), the model's graph and the cluster that stages 1 to 3 made of it."""

    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
