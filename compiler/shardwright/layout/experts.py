"""Mixtures of experts: how many a layer has, by its parameters."""

from __future__ import annotations

import re

from shardwright.ir.model_graph import Layer, ModelGraph
from shardwright.remembered import remembered

_NUMBERED = re.compile(r"experts\.(\d+)\.")


@remembered(lambda graph: graph.config_hash)  # rules ask for each layout
def experts_of(graph: ModelGraph) -> int:
    """Of the decoder layer that has the most; 0 where the model is dense."""
    return max(map(_of_layer, graph.layers))


def _of_layer(layer: Layer) -> int:
    """One tensor holds all experts, or each is a module with a number."""
    most = 0
    numbers: set[str] = set()
    for p in layer.parameters:
        if len(p.shape) == 3 and ("expert" in p.name or "moe" in p.name):
            most = max(most, p.shape[0])
        elif numbered := _NUMBERED.search(p.name):
            numbers.add(numbered[1])
    return max(most, len(numbers))
