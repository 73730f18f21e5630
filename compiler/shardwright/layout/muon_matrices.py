"""Find the parameters that Muon orthogonalizes, by a model's names and shapes; AdamW has the rest.

Muon takes the matrices of the decoder layers (https://kellerjordan.github.io/posts/muon, arXiv
2502.16982). AdamW takes embeddings, the head and their ties, norms, biases and every other vector.
"""

from __future__ import annotations

import functools

from shardwright.layout.fused_weights import (
    JoinedMatrices,
    joined_matrices,
    matrix_sizes,
    stacked_weights,
)
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import ModelGraph, Parameter, name_pattern
from shardwright.models.trainable_parameters import frozen_parameter_names

_NO_MATRICES = ("norm", "embed", "conv", "bias")
"""Parts of names of modules whose two-dimensional weight is a table, a filter or a row a head."""


def is_muon_matrix(graph: ModelGraph, parameter: Parameter) -> bool:
    """Return whether a parameter of a decoder layer is a matrix, or a stack of experts' matrices.

    A third dimension stacks matrices only in a module of experts.
    """
    module, _, leaf = parameter.name.rpartition(".")
    if "bias" in leaf or min(parameter.shape[-2:], default=0) < 2:
        return False
    if len(parameter.shape) == 3:
        return module in expert_modules(graph)
    owner = module.rpartition(".")[2].lower()
    return (
        len(parameter.shape) == 2
        and leaf == "weight"
        and not any(word in owner for word in _NO_MATRICES)
    )


@functools.lru_cache(maxsize=64)
def muon_parameters(graph: ModelGraph, freeze: tuple[str, ...]) -> tuple[Parameter, ...]:
    """Return the trained parameters that Muon orthogonalizes, in the model's order."""
    frozen = frozen_parameter_names(graph, freeze)
    return tuple(
        p
        for layer in graph.layers
        if layer.kind == "decoder"
        for p in layer.parameters
        if p.name not in frozen
        and not {p.name, name_pattern(p.name)} & set(graph.cut.untrained)
        and is_muon_matrix(graph, p)
    )


def unsplit_parameter(graph: ModelGraph, freeze: tuple[str, ...]) -> Parameter | None:
    """Return a parameter that joins matrices in an order that this version does not know."""
    return next(
        (p for p in muon_parameters(graph, freeze) if joined_matrices(graph, p) is None), None
    )


def muon_matrices(graph: ModelGraph, freeze: tuple[str, ...]) -> dict[str, JoinedMatrices]:
    """Return Muon's parameters by pattern, with the matrices that they join.

    A pattern (`*` for numbers) stands for all parameters that it matches; one whose matrices differ
    between layers is listed by its layers' own names.
    """
    by_pattern: dict[str, dict[str, JoinedMatrices]] = {}
    for p in muon_parameters(graph, freeze):
        joined = joined_matrices(graph, p) or JoinedMatrices()
        by_pattern.setdefault(name_pattern(p.name), {})[p.name] = joined
    every: dict[str, int] = {}
    for layer in graph.layers:
        for p in layer.parameters:
            every[name_pattern(p.name)] = every.get(name_pattern(p.name), 0) + 1
    found: dict[str, JoinedMatrices] = {}
    for pattern, names in by_pattern.items():
        alike = len(set(names.values())) == 1 and len(names) == every[pattern]
        found |= {pattern: next(iter(names.values()))} if alike else names
    return found


def newton_schulz_flops(graph: ModelGraph, parameter: Parameter, steps: int) -> int:
    """Return the FLOPs of an update's Newton-Schulz iterations on an unsharded parameter.

    An iteration on m x n, m <= n, is X X^T (2 m^2 n), its square (2 m^3) and a product with X
    (2 m^2 n).
    """
    sizes = matrix_sizes(parameter, joined_matrices(graph, parameter) or JoinedMatrices())
    iteration = sum(4 * m * m * n + 2 * m**3 for m, n in sizes)
    return stacked_weights(parameter) * steps * iteration
