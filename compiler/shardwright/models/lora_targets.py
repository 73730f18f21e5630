"""LoRA (arXiv 2106.09685): which modules are adapted, and how many elements their adapters have."""

from __future__ import annotations

from shardwright.models.model_graph import Layer, ModelGraph, Parameter
from shardwright.recipe.recipe_types import LoraSection

_NOT_LINEAR = ("router", "norm", "embed")
"""In the name of a module whose matrix `auto` leaves alone, as it does a mixture's `gate`."""


def adapted_modules(graph: ModelGraph, lora: LoraSection) -> tuple[str, ...]:
    """The last part of each adapted module's path, in the model's order; () where `auto` finds
    none."""
    return default_target_modules(graph) if lora.target_modules is None else lora.target_modules


def default_target_modules(graph: ModelGraph) -> tuple[str, ...]:
    """What `auto` stands for."""
    names = dict.fromkeys(
        _module(p) for layer in graph.layers if layer.kind == "decoder" for p in _matrices(layer)
    )
    return tuple(n for n in names if n != "gate" and not any(part in n for part in _NOT_LINEAR))


def adapter_sizes(layer: Layer, names: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Elements of each adapter tensor on a layer: A (rank, in) and B (out, rank) of every module
    named."""
    if layer.kind != "decoder":
        return ()
    return tuple(rank * size for p in _matrices(layer) if _module(p) in names for size in p.shape)


def _matrices(layer: Layer) -> list[Parameter]:
    return [p for p in layer.parameters if len(p.shape) == 2 and p.name.endswith(".weight")]


def _module(parameter: Parameter) -> str:
    return parameter.name.split(".")[-2]
