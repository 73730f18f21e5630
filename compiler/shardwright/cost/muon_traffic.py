"""Count the bytes that ranks hand to collectives to bring Muon's matrices together.

Under DeepSpeed a matrix whose elements several ranks own is summed up twice: gathered, and shared
out again (engines/deepspeed/muon_optimizer.py). Under Megatron-Core tensor ranks gather the shards
of a matrix in fp32 (engines/megatron/megatron_muon.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.layout.formats import MASTER_BYTES
from shardwright.layout.muon_matrices import muon_parameters
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.tensor_parallel_map import split_parameter
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import ModelGraph
from shardwright.utils.memoize import memoize

_ALIGNMENT = 2
"""DeepSpeed pads a flat group of parameters to a multiple of this and of its ranks
(zero/stage_1_and_2.py, nccl_start_alignment_factor)."""


class _Weight(NamedTuple):
    """Count the elements of one of Muon's weights: all, and those of a tensor rank."""

    numel: int
    shard_numel: int
    is_experts: bool


@functools.lru_cache(maxsize=64)
def _weights(
    graph: ModelGraph, freeze: tuple[str, ...], tensor: int
) -> tuple[tuple[_Weight, ...], ...]:
    """Return the weights of each layer, in the model's order."""
    names, experts = {p.name for p in muon_parameters(graph, freeze)}, expert_modules(graph)
    return tuple(
        tuple(
            _Weight(
                numel=p.numel,
                shard_numel=split_parameter(graph, p, tensor).shard_numel(0),
                is_experts=p.name.rpartition(".")[0] in experts,
            )
            for p in layer.parameters
            if p.name in names
        )
        for layer in graph.layers
    )


def _key(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> Hashable:
    s = priced.strategy
    ranks = (s.tensor, s.expert, s.expert_tensor_ranks, s.zero_world_size, s.zero_stage)
    spans = tuple((block.start, block.stop) for block in blocks)
    return priced.graph.identity, priced.recipe.model.freeze, ranks, spans, priced.traits


def gathered_matrix_numel(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> int:
    """Return the elements of the unsharded matrices that no rank of a pipeline rank owns by
    itself, of the experts that the rank holds; 0 without Muon."""
    has_muon = OPTIMIZERS[priced.recipe.training.optimizer.name].matrix_moments
    return _gathered_numel(priced, blocks) if has_muon else 0


@memoize(_key)
def _gathered_numel(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> int:
    s = priced.strategy
    layers = _weights(priced.graph, priced.recipe.model.freeze, s.tensor)
    weights = [w for block in blocks for each in layers[block.start : block.stop] for w in each]
    if priced.traits.repeats_orthogonalization:
        return sum(
            w.numel // (s.expert if w.is_experts else 1)
            for w in weights
            if w.shard_numel < w.numel and (not w.is_experts or s.expert_tensor_ranks > 1)
        )
    dense = [w for w in weights if not w.is_experts or s.expert == 1]
    experts = [
        _Weight(w.numel // s.expert, w.shard_numel // s.expert, is_experts=True)
        for w in weights
        if w.is_experts and s.expert > 1
    ]
    groups = ((dense, s.zero_world_size), (experts, s.zero_world_size // s.expert))
    return sum(
        w.numel
        for group, ranks in groups
        for w, is_cut in zip(group, _cut(group, ranks, s.zero_stage), strict=True)
        if is_cut or w.shard_numel < w.numel
    )


def _cut(weights: list[_Weight], ranks: int, zero_stage: int) -> Iterable[bool]:
    """Return which weights of a group ZeRO cuts: at stage 3 all, below those that reach over the
    end of a rank's part of the flat group."""
    if zero_stage in (0, 3) or ranks == 1:
        return (zero_stage == 3 and ranks > 1 for _ in weights)
    ends = list(itertools.accumulate(w.shard_numel for w in weights))
    unit = _ALIGNMENT * ranks
    part = -(-ends[-1] // unit) * unit // ranks if ends else 1
    starts = [0, *ends]
    return ((end - 1) // part > start // part for start, end in zip(starts, ends, strict=False))


def matrix_gather_bytes(priced: PricedLayout, rank: int) -> float:
    """Return the bytes of a pipeline rank's collectives on Muon's matrices in a step."""
    numel = gathered_matrix_numel(priced, priced.ranks[rank])
    if priced.traits.repeats_orthogonalization:
        return float(numel * MASTER_BYTES)
    return float(2 * numel * priced.element_bytes)
