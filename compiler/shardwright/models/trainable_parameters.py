"""Which parameters a recipe leaves as they are: parts of a model that sees, and patterns of
names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import get_args

from shardwright.models.model_graph import Layer, ModelGraph, ModelPart, Parameter, name_pattern
from shardwright.recipe.recipe_types import LoraSection

MODEL_PARTS: tuple[str, ...] = get_args(ModelPart)


def frozen_parameter_names(graph: ModelGraph, freeze: tuple[str, ...]) -> frozenset[str]:
    """Of the parameters in graph.layers. freeze: `model.freeze`; a part of a model that does not
    see is "text"."""
    return _frozen(graph, freeze) if freeze else frozenset()


def parameters_matching(graph: ModelGraph, entry: str) -> frozenset[str]:
    """What one entry of `model.freeze` names. A pattern is of parameters, as fnmatch has it (`*`
    stands for dots too); a module's path is all that lies under it."""
    names = dict.fromkeys(p.name for layer in graph.layers for p in layer.parameters)
    if entry in MODEL_PARTS:
        return frozenset(n for n in names if model_part_of(graph, n) == entry)
    return frozenset(n for n in names if fnmatchcase(n, entry) or fnmatchcase(n, f"{entry}.*"))


def frozen_parameter_patterns(graph: ModelGraph, freeze: tuple[str, ...]) -> tuple[str, ...]:
    """The frozen parameters in the model's order; those that differ in their numbers alone, and are
    all frozen, once, with * for the numbers. A tied one by each of its names."""
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


def model_part_of(graph: ModelGraph, name: str) -> str:
    return "text" if graph.vision is None else graph.vision.part(name)


def is_decoder_frozen(graph: ModelGraph, freeze: tuple[str, ...]) -> bool:
    """Whether no decoder layer has anything to train."""
    frozen = frozen_parameter_names(graph, freeze)
    decoder: Iterable[str] = (
        p.name for layer in graph.layers if layer.kind == "decoder" for p in layer.parameters
    )
    return bool(frozen) and all(name in frozen for name in decoder)


_KNOWN: dict[tuple[object, ...], frozenset[str]] = {}


def _frozen(graph: ModelGraph, freeze: tuple[str, ...]) -> frozenset[str]:
    """A search asks for the same thousands of times."""
    key = (graph.identity, freeze)
    if key not in _KNOWN:
        _KNOWN[key] = functools.reduce(
            frozenset.union, (parameters_matching(graph, entry) for entry in freeze)
        )
    return _KNOWN[key]


# LoRA (arXiv 2106.09685): which modules are adapted, and how many elements their adapters have.


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
