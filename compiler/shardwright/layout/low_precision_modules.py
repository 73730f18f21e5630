"""Find the linears of a model whose products run in `training.low_precision`."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase

from shardwright.layout.formats import LOW_PRECISION_FORMATS
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import Layer, ModelGraph
from shardwright.models.trainable_parameters import linear_modules
from shardwright.recipe.recipe_types import TrainingSection


def low_precision_modules(
    graph: ModelGraph, training: TrainingSection, *, is_emulated: bool
) -> tuple[str, ...]:
    """Return the paths of the linears that the recipe's low precision converts, in the model's
    order; () without one. Without low_precision_keep the format's published recipe keeps layers.

    is_emulated: no kernel runs, so that widths of any size do
    """
    if training.low_precision == "none":
        return ()
    layers = [layer for layer in graph.layers if layer.kind == "decoder"]
    shares = LOW_PRECISION_FORMATS[training.low_precision].bf16_ends
    first, last = (round(share * len(layers)) for share in shares)
    if training.low_precision_keep:
        first = last = 0
    return tuple(
        path
        for layer in layers[first : len(layers) - last]
        for path in _converted(
            layer, training.low_precision, training.low_precision_keep, is_emulated
        )
    )


def low_precision_experts(graph: ModelGraph, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the stacks of experts' weights in the layers of converted linears, in the
    model's order, for an engine whose experts multiply in low precision."""
    stacks = expert_modules(graph)
    return tuple(
        p.name
        for layer in graph.layers
        if any(path.startswith(f"{layer.name}.") for path in modules)
        for p in layer.parameters
        if len(p.shape) == 3 and p.name.rpartition(".")[0] in stacks
    )


def low_precision_shares(
    graph: ModelGraph, training: TrainingSection, *, is_emulated: bool
) -> dict[str, float]:
    """Return path within a decoder layer -> the share of the layers with this linear in which it is
    converted; {} without low precision."""
    if training.low_precision == "none":  # asked for each layout that is priced
        return {}
    converted = set(low_precision_modules(graph, training, is_emulated=is_emulated))
    counts: dict[str, list[bool]] = {}
    for layer in graph.layers:
        for path in linear_modules(layer):
            counts.setdefault(path[len(layer.name) + 1 :], []).append(path in converted)
    return {name: sum(flags) / len(flags) for name, flags in counts.items()}


@functools.lru_cache(maxsize=4096)
def _converted(
    layer: Layer, low_precision: str, keep: tuple[str, ...], is_emulated: bool
) -> tuple[str, ...]:
    multiple = 1 if is_emulated else LOW_PRECISION_FORMATS[low_precision].width_multiple
    return tuple(
        path
        for path, shape in linear_modules(layer).items()
        if not any(width % multiple for width in shape)
        and not any(keeps(entry, path) for entry in keep)
    )


def keeps(entry: str, path: str) -> bool:
    """Return whether an entry of `training.low_precision_keep` names a module: by its path, by the
    path's last part, or by a module around it. `*` matches dots too."""
    names = (path, path.rpartition(".")[2])
    return any(fnmatchcase(name, entry) for name in names) or fnmatchcase(path, f"{entry}.*")
