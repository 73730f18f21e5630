"""Find the experts of a mixture-of-experts model in its graph, by parameter names and shapes."""

from __future__ import annotations

import functools
import re

from shardwright.models.model_graph import ModelGraph

_NUMBERED = re.compile(r"experts\.(\d+)\.")


@functools.lru_cache(maxsize=64)  # rules ask for each layout
def experts_per_layer(graph: ModelGraph) -> int:
    """Return the number of experts in the decoder layer that has the most; 0 for a dense model."""
    most = 0
    for layer in graph.layers:
        numbers: set[str] = set()
        for p in layer.parameters:
            if len(p.shape) == 3 and ("expert" in p.name or "moe" in p.name):  # stacked
                most = max(most, p.shape[0])
            elif numbered := _NUMBERED.search(p.name):
                numbers.add(numbered[1])
        most = max(most, len(numbers))
    return most


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
            name = module.rpartition(".")[2]
            # Shared experts, to which no tokens are routed, may be stacked too.
            is_routed = ("expert" in module or "moe" in module) and "shared" not in name
            is_stacked = any(len(s) == 3 for s in shapes) and len({s[0] for s in shapes}) == 1
            if layer.kind == "decoder" and is_routed and is_stacked:
                found[module] = shapes[0][0]
    return found
