"""Per layer and tensor degree: what one rank holds and computes. Summed over stages by prefix sums.

Shape letters: S sequence length, b micro-batch, H hidden size, t tensor degree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.ir.model_graph import Layer, ModelGraph
from shardwright.partition.tensor import TRANSPOSED_LINEAR_TYPES, module_pattern, split_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTotals:
    """Prefix sums over graph.layers (length layers + 1), for the fullest tensor rank (the first).

    Activations are elements per token: `replicated` is held by every tensor rank, the others are cut.
    shared_numel: the tied tensor's local elements, which embedding and head both list (0 if untied).
    """

    numel: tuple[int, ...]
    matmul_flops: tuple[int, ...]
    attention_flops: tuple[int, ...]
    decoder_layers: tuple[int, ...]
    shared_numel: int
    layer_numel: int
    layer_elements_replicated: int
    layer_elements_attention: int
    layer_elements_other: int
    layer_scores: int
    head_elements: int


# Keyed by what the numbers depend on, so that a search over thousands of layouts splits each parameter once.
_CACHE: dict[tuple[str, int], LayerTotals] = {}


def layer_totals(graph: ModelGraph, tensor: int) -> LayerTotals:
    key = (graph.config_hash, tensor)
    if key not in _CACHE:
        _CACHE[key] = _layer_totals(graph, tensor)
    return _CACHE[key]


def _layer_totals(graph: ModelGraph, tensor: int) -> LayerTotals:
    styles = dict(graph.tensor_styles)
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES

    def local(layer: Layer) -> int:
        return sum(
            split_parameter(
                p, styles.get(module_pattern(p.name.rpartition(".")[0]), "replicated"), tensor, transposed
            ).shard_numel(0)
            for p in layer.parameters
        )

    def prefix(value: Callable[[Layer], int]) -> tuple[int, ...]:
        return (0, *itertools.accumulate(value(layer) for layer in graph.layers))

    numel = prefix(local)
    first, last = graph.layers[1], graph.layers[-1]
    shared = {p.name for p in graph.layers[0].parameters} & {p.name for p in last.parameters}
    shared_numel = sum(
        split_parameter(p, "vocabulary_head", tensor, transposed).shard_numel(0)
        for p in last.parameters
        if p.name in shared
    )
    # The inputs and outputs of both norms, and the dropout masks, are whole on every tensor rank (arXiv 2205.05198).
    replicated = 4 * graph.hidden_size + (graph.hidden_size if graph.max_dropout > 0 else 0)
    attention = first.attention_activation_elements_per_token
    return LayerTotals(
        numel=numel,
        matmul_flops=prefix(lambda layer: layer.matmul_flops_per_token),
        attention_flops=prefix(lambda layer: layer.attention_flops_per_token_per_position),
        decoder_layers=prefix(lambda layer: int(layer.kind == "decoder")),
        shared_numel=shared_numel,
        layer_numel=numel[2] - numel[1],
        layer_elements_replicated=replicated,
        layer_elements_attention=attention,
        layer_elements_other=max(0, first.activation_elements_per_token - attention - replicated),
        layer_scores=first.attention_matrix_elements_per_token_per_position,
        head_elements=last.activation_elements_per_token,
    )
