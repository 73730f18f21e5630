"""What memory and time both need to know about one layout: dtypes, blocks per pipeline rank, links."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.constants import LINK_EFFICIENCY
from shardwright.cost.layers import LayerTotals, layer_totals
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.ir.strategy import Strategy
from shardwright.partition.stages import cut_evenly, cut_mirrored, layer_costs
from shardwright.plan.build import accumulation_dtype

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Contiguous layers [start, stop) on one pipeline rank; DualPipeV gives a rank two."""

    start: int
    stop: int
    in_flight: float  # micro-batches whose activations are kept at once

    def of(self, prefix: tuple[int, ...]) -> int:
        return prefix[self.stop] - prefix[self.start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    strategy: Strategy
    totals: LayerTotals
    ranks: tuple[tuple[Block, ...], ...]  # per pipeline rank
    element_bytes: int
    accumulation_dtype: str

    @property
    def tokens(self) -> int:
        """b x S: tokens of one micro-batch."""
        return self.strategy.micro_batch_size * self.recipe.training.sequence_length

    def has_head(self, rank: int) -> bool:
        return any(block.start < block.stop == len(self.graph.layers) for block in self.ranks[rank])

    def numel(self, rank: int) -> int:
        """Parameters of one rank of this pipeline rank; a tied tensor that is on it twice counts once."""
        blocks = self.ranks[rank]
        total = sum(block.of(self.totals.numel) for block in blocks)
        both = blocks[0].start == 0 and self.has_head(rank)
        return total - (self.totals.shared_numel if both else 0)

    def link_bytes_per_second(self, reach: int) -> float:
        """Per GPU, of a group whose members lie within `reach` consecutive ranks (nodes are filled in order)."""
        inside = reach <= self.cluster.gpus_per_node
        raw = self.cluster.intra_node_bytes_per_second if inside else self.cluster.inter_node_bytes_per_second
        return raw * LINK_EFFICIENCY


def make_layout(recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> Layout:
    return Layout(
        recipe=recipe,
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        totals=layer_totals(graph, strategy.tensor),
        ranks=_blocks(graph, strategy, recipe.training.sequence_length),
        element_bytes=ELEMENT_BYTES[recipe.training.precision],
        accumulation_dtype=accumulation_dtype(recipe.training),
    )


def _blocks(graph: ModelGraph, strategy: Strategy, sequence_length: int) -> tuple[tuple[Block, ...], ...]:
    """Micro-batches in flight: 1F1B keeps min(p - rank, m); DualPipeV (arXiv 2412.19437 and its V-shaped cut) keeps
    min(2p - rank, m) of the outward half and min(rank + 1, m) of the returning one; interleaving by v adds the share
    (p - 1) / (p v) (arXiv 2205.05198)."""
    p, m = strategy.pipeline, strategy.gradient_accumulation_steps
    costs = layer_costs(graph, sequence_length)
    layers = len(costs)
    if strategy.schedule == "dualpipev":
        parts = cut_mirrored(costs, 2 * p) if layers >= 2 * p else _thin(layers, 2 * p)
        return tuple(
            (
                Block(start=parts[r], stop=parts[r + 1], in_flight=min(2 * p - r, m)),
                Block(start=parts[2 * p - 1 - r], stop=parts[2 * p - r], in_flight=min(r + 1, m)),
            )
            for r in range(p)
        )
    parts = cut_evenly(costs, p) if layers >= p else _thin(layers, p)
    v = strategy.virtual_stages
    extra = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return tuple((Block(start=parts[r], stop=parts[r + 1], in_flight=min(p - r, m) * extra),) for r in range(p))


def _thin(layers: int, stages: int) -> tuple[int, ...]:
    """More stages than layers is forbidden, but numbers are still given: some stages are empty."""
    return (*(min(s, layers) for s in range(stages)), layers)
