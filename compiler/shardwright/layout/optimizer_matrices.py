"""Find the parameters whose optimizer states differ from those of single elements."""

from __future__ import annotations

import functools

from shardwright.layout.muon_matrices import muon_parameters
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.quantized_moments import is_quantized
from shardwright.models.model_graph import ModelGraph, Parameter, name_pattern
from shardwright.models.trainable_parameters import frozen_parameter_names


def matrix_parameters(
    optimizer: str, graph: ModelGraph, freeze: tuple[str, ...]
) -> tuple[Parameter, ...]:
    """Return those parameters, each once, in the model's order.

    They are Muon's matrices, the trained parameters of two or more dimensions where the second
    moment is factored, or those that are large enough to be quantized.
    """
    row = OPTIMIZERS[optimizer]
    if row.orthogonalizes:
        return muon_parameters(graph, freeze)
    trained = _trained_parameters(graph, freeze) if row.factors or row.quantizes else ()
    if row.quantizes:
        return tuple(p for p in trained if is_quantized(p.numel))
    return tuple(p for p in trained if len(p.shape) >= 2)


@functools.lru_cache(maxsize=64)
def _trained_parameters(graph: ModelGraph, freeze: tuple[str, ...]) -> tuple[Parameter, ...]:
    frozen, untrained = frozen_parameter_names(graph, freeze), set(graph.cut.untrained)
    found = {
        p.name: p
        for layer in graph.layers
        for p in layer.parameters
        if p.name not in frozen and not {p.name, name_pattern(p.name)} & untrained
    }
    return tuple(found.values())


def factor_elements(parameter: Parameter) -> int:
    """Return the elements of a factored second moment: a row and a column of each matrix."""
    rows, columns = parameter.shape[-2:]
    return parameter.numel // (rows * columns) * (rows + columns)
