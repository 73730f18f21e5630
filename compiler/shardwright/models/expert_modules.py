"""Mixtures of experts: how many a layer has, by its parameters, and which of them expert ranks
share out."""

from __future__ import annotations

import re

from shardwright.models.model_graph import Layer, ModelGraph
from shardwright.utils.memoize import memoize

_NUMBERED = re.compile(r"experts\.(\d+)\.")


@memoize(lambda graph: graph.config_hash)  # rules ask for each layout
def experts_per_layer(graph: ModelGraph) -> int:
    """Of the decoder layer that has the most; 0 where the model is dense."""
    return max(map(_of_layer, graph.layers))


@memoize(lambda graph: graph.config_hash)
def expert_modules(graph: ModelGraph) -> dict[str, int]:
    """Modules whose own parameters are stacks of as many experts along the first dimension -> how
    many. By names and shapes; whether expert ranks can share them out is the model's own matter
    (models/mixture_of_experts.py)."""
    found: dict[str, int] = {}
    for layer in graph.layers:
        owned: dict[str, list[tuple[int, ...]]] = {}
        for p in layer.parameters:
            owned.setdefault(p.name.rpartition(".")[0], []).append(p.shape)
        for module, shapes in owned.items():
            stacked = any(len(shape) == 3 for shape in shapes) and _is_routed(module)
            if layer.kind == "decoder" and stacked and len({shape[0] for shape in shapes}) == 1:
                found[module] = shapes[0][0]
    return found


def _is_routed(module: str) -> bool:
    """Shared experts, which every token takes, may be a stack as well: each rank has all of
    them."""
    return ("expert" in module or "moe" in module) and "shared" not in module.rpartition(".")[2]


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
