"""Find the parameters that a recipe freezes (`model.freeze`) and the modules that LoRA adapts."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import get_args

from shardwright.models.model_graph import Layer, ModelGraph, ModelPart, Parameter, name_pattern
from shardwright.recipe.recipe_types import LoraSection

MODEL_PARTS: tuple[str, ...] = get_args(ModelPart)


@functools.lru_cache(maxsize=64)
def frozen_parameter_names(graph: ModelGraph, freeze: tuple[str, ...]) -> frozenset[str]:
    """Return the frozen parameters of graph.layers.

    freeze: `model.freeze`. The "text" part of a text-only model is all of it.
    """
    return frozenset().union(*(parameters_matching(graph, entry) for entry in freeze))


def parameters_matching(graph: ModelGraph, entry: str) -> frozenset[str]:
    """Return the parameters that one entry of `model.freeze` names.

    An entry is a part of the model, an fnmatch pattern (`*` matches dots too) or a module's path.
    """
    names = dict.fromkeys(p.name for layer in graph.layers for p in layer.parameters)
    if entry in MODEL_PARTS:
        if graph.vision is None:
            return frozenset(names if entry == "text" else ())
        return frozenset(n for n in names if graph.vision.part(n) == entry)
    return frozenset(n for n in names if fnmatchcase(n, entry) or fnmatchcase(n, f"{entry}.*"))


def frozen_parameter_patterns(graph: ModelGraph, freeze: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frozen parameters in the model's order, a tied one under each of its names.

    Parameters that differ only in numbers become one pattern where all of them are frozen.
    """
    names = frozen_parameter_names(graph, freeze)
    names |= {n for group in graph.tied if group[0] in names for n in group}
    tied = [n for group in graph.tied for n in group]
    every = dict.fromkeys([*(p.name for layer in graph.layers for p in layer.parameters), *tied])
    left = {name_pattern(n) for n in every if n not in names}
    return tuple(
        dict.fromkeys(
            n if name_pattern(n) in left else name_pattern(n) for n in every if n in names
        )
    )


def is_decoder_frozen(graph: ModelGraph, freeze: tuple[str, ...]) -> bool:
    """Return whether no decoder layer has a trainable parameter."""
    frozen = frozen_parameter_names(graph, freeze)
    decoder: Iterable[str] = (
        p.name for layer in graph.layers if layer.kind == "decoder" for p in layer.parameters
    )
    return bool(frozen) and all(name in frozen for name in decoder)


# LoRA (arXiv 2106.09685): the adapted modules and the sizes of their adapters.


_NOT_LINEAR = ("router", "norm", "embed")
"""Parts of names of modules that `auto` does not adapt, beside a router's `gate`."""


def adapted_modules(graph: ModelGraph, lora: LoraSection) -> tuple[str, ...]:
    """Return the last part of each adapted module's path, in the model's order; () where `auto`
    finds none."""
    return default_target_modules(graph) if lora.target_modules is None else lora.target_modules


def default_target_modules(graph: ModelGraph) -> tuple[str, ...]:
    """Return the modules that `target_modules: auto` means."""
    paths = (path for layer in graph.layers for path in linear_modules(layer))
    return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def linear_modules(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Return path -> weight shape of a decoder layer's linears: routers, norms, embeddings and
    stacks of experts are none."""
    if layer.kind != "decoder":
        return {}
    return {
        p.name.removesuffix(".weight"): p.shape
        for p in _matrices(layer)
        if (name := _module(p)) != "gate" and not any(part in name for part in _NOT_LINEAR)
    }


def adapter_sizes(layer: Layer, names: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the elements of each adapter tensor on a layer: A (rank, in) and B (out, rank) of each
    module."""
    if layer.kind != "decoder":
        return ()
    return tuple(rank * size for p in _matrices(layer) if _module(p) in names for size in p.shape)


def _matrices(layer: Layer) -> list[Parameter]:
    return [p for p in layer.parameters if len(p.shape) == 2 and p.name.endswith(".weight")]


def _module(parameter: Parameter) -> str:
    return parameter.name.split(".")[-2]
