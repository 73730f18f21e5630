"""Tell which rows of a weight are those of each matrix that it joins: query, key and value, or gate
and up.

The tensor-parallel map knows weights whose matrices lie one after another. The table here has the
other orders, as the modules of transformers read them. tests/unit/layout/test_fused_weights.py
compares each entry with its model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.layout.tensor_parallel_map import fused_blocks
from shardwright.models.model_graph import ModelGraph, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOrder:
    """Describe how a weight holds the rows (output features) of its matrices.

    groups: the rows alternate: each group has an equal share of each matrix; 1 where the matrices
        lie one after another
    is_transposed: the weight ends in (in, out), so that its rows are columns
    """

    groups: int = 1
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMatrices:
    """Hold the matrices of a weight.

    rows: those of each matrix; () for one matrix
    """

    rows: tuple[int, ...] = ()
    order: FusedOrder = FusedOrder()


Split = Callable[[ModelGraph, int], JoinedMatrices | None]
"""Returns the matrices of a weight with this number of rows; None where they do not divide."""


def _attention_rows(graph: ModelGraph, rows: int, key_value_heads: int) -> tuple[int, ...] | None:
    heads = graph.attention_heads
    head, rest = divmod(rows, heads + 2 * key_value_heads)
    return None if rest else (heads * head, key_value_heads * head, key_value_heads * head)


def _blocks(graph: ModelGraph, rows: int) -> JoinedMatrices | None:
    """All query heads, all key heads, all value heads."""
    parts = _attention_rows(graph, rows, graph.key_value_heads)
    return None if parts is None else JoinedMatrices(rows=parts)


def _by_head(graph: ModelGraph, rows: int) -> JoinedMatrices | None:
    """Return query, key and value of the first head, those of the second, and so on."""
    return _grouped(graph, rows, graph.attention_heads, graph.attention_heads)


def _by_key_value_head(graph: ModelGraph, rows: int) -> JoinedMatrices | None:
    """Return each key/value head's query heads, its key, its value. A head is as wide as the
    hidden size allows, and the rows tell the number of key/value heads."""
    heads = graph.attention_heads
    key_value_heads = (rows * heads // graph.hidden_size - heads) // 2
    return _grouped(graph, rows, key_value_heads, key_value_heads)


def _in_four_groups(graph: ModelGraph, rows: int) -> JoinedMatrices | None:
    """Return four groups of heads; in each all queries, all values, all keys."""
    return _grouped(graph, rows, graph.attention_heads, 4)


def _grouped(
    graph: ModelGraph, rows: int, key_value_heads: int, groups: int
) -> JoinedMatrices | None:
    parts = _attention_rows(graph, rows, key_value_heads)
    if parts is None or groups < 1 or any(part % groups for part in parts):
        return None
    return JoinedMatrices(rows=parts, order=FusedOrder(groups=groups))


def _halves(_: ModelGraph, rows: int) -> JoinedMatrices | None:
    return None if rows % 2 else JoinedMatrices(rows=(rows // 2, rows // 2))


def _alternating(_: ModelGraph, rows: int) -> JoinedMatrices | None:
    """Gate and up, feature by feature."""
    half = rows // 2
    return None if rows % 2 else JoinedMatrices(rows=(half, half), order=FusedOrder(groups=half))


FUSED_WEIGHTS: Mapping[str, Mapping[str, Split]] = {
    "aria_text": {"gate_up_proj": _halves},
    "bloom": {"query_key_value": _by_head},
    "codegen": {"qkv_proj": _in_four_groups},
    "dbrx": {"Wqkv": _blocks},
    "falcon": {"query_key_value": _by_key_value_head},
    "fuyu": {"query_key_value": _by_head},
    "glm": {"gate_up_proj": _halves},
    "glm4": {"gate_up_proj": _halves},
    "gpt_bigcode": {"c_attn": _by_key_value_head},
    "gpt_neox": {"query_key_value": _by_head},
    "gpt_neox_japanese": {"query_key_value": _by_head},
    "gpt_oss": {"gate_up_proj": _alternating},
    "llama4": {"gate_up_proj": _halves},
    "llama4_text": {"gate_up_proj": _halves},
    "minimax": {"qkv_proj": _by_head},
    "persimmon": {"query_key_value": _by_head},
    "phi3": {"qkv_proj": _blocks, "gate_up_proj": _halves},
    "phi4_multimodal": {"qkv_proj": _blocks, "gate_up_proj": _halves},
}
"""Maps a model type to its fused weights, by the last part of the name without `.weight`."""

TRANSPOSED_EXPERTS = ("aria_text", "gpt_oss", "llama4", "llama4_text")
"""Lists the model types whose stacked experts end in (in, out)."""

_FUSED = re.compile(
    r"qkv|query_key_value|c_attn|in_proj|gate_up|gate_and_up|wi_fused|w12", re.IGNORECASE
)
"""Matches names of weights that join several matrices: of attention, or of a gated feed-forward."""


def joined_matrices(graph: ModelGraph, parameter: Parameter) -> JoinedMatrices | None:
    """Return the matrices of a weight (out, in), or of a stack of them; None where their order is
    not known."""
    leaf = parameter.name.removesuffix(".weight").rpartition(".")[2]
    is_transposed = len(parameter.shape) == 3 and graph.model_type in TRANSPOSED_EXPERTS
    split = FUSED_WEIGHTS.get(graph.model_type, {}).get(leaf)
    if split is not None:
        found = split(graph, parameter.shape[-1 if is_transposed else -2])
        if found is None or not is_transposed:
            return found
        order = FusedOrder(groups=found.order.groups, is_transposed=True)
        return JoinedMatrices(rows=found.rows, order=order)
    blocks = fused_blocks(graph, parameter)
    if blocks is None or (blocks == () and _FUSED.search(leaf)):
        return None
    return JoinedMatrices(rows=blocks, order=FusedOrder(is_transposed=is_transposed))


def matrix_sizes(parameter: Parameter, joined: JoinedMatrices) -> list[tuple[int, int]]:
    """Return the smaller and the larger dimension of each matrix of a weight; a stack counts one
    of its weights."""
    *_, rows, columns = parameter.shape
    if joined.order.is_transposed or (joined.rows and sum(joined.rows) != rows):
        rows, columns = columns, rows  # Conv1D holds (in, out)
    return [(min(part, columns), max(part, columns)) for part in joined.rows or (rows,)]


def stacked_weights(parameter: Parameter) -> int:
    """Return the number of weights (out, in) that a parameter stacks."""
    return math.prod(parameter.shape[:-2])
