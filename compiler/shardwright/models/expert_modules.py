"""Find the experts of a mixture-of-experts model in its graph, by parameter names and shapes."""

from __future__ import annotations

import functools
import re

from shardwright.models.model_graph import Layer, ModelGraph

_NUMBERED = re.compile(r"experts\.(\d+)\.")


@functools.lru_cache(maxsize=64)  # rules ask for each layout
def experts_per_layer(graph: ModelGraph) -> int:
    """Return the number of experts in the decoder layer that has the most; 0 for a dense model."""
    return max(map(_of_layer, graph.layers))


@functools.lru_cache(maxsize=64)
def expert_modules(graph: ModelGraph) -> dict[str, int]:
    """Map each module that stacks its experts in the first dimension of its parameters to their
    number.

    models/mixture_of_experts.py verifies whether the model can split them over expert ranks.
    """
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
    """Return whether tokens are routed to this module's experts; shared experts may be stacked
    too."""
    return ("expert" in module or "moe" in module) and "shared" not in module.rpartition(".")[2]


def _of_layer(layer: Layer) -> int:
    """Count a layer's experts: stacked in one tensor, or numbered modules."""
    most = 0
    numbers: set[str] = set()
    for p in layer.parameters:
        if len(p.shape) == 3 and ("expert" in p.name or "moe" in p.name):
            most = max(most, p.shape[0])
        elif numbered := _NUMBERED.search(p.name):
            numbers.add(numbered[1])
    return max(most, len(numbers))
