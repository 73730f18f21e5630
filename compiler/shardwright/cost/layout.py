"""What memory and time both need to know about one layout: blocks per pipeline rank, shapes, dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.activations import Activations, activations
from shardwright.cost.compute import ELEMENT_BYTES, runs_megatron
from shardwright.cost.constants import Constants
from shardwright.cost.shapes import ModelShapes, model_shapes
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.ir.strategy import Strategy
from shardwright.partition.stages import cut_layers, most_stages
from shardwright.plan.build import accumulation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Contiguous layers [start, stop) on one pipeline rank; DualPipeV gives a rank two."""

    start: int
    stop: int
    in_flight: float  # micro-batches whose activations are kept at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    strategy: Strategy
    constants: Constants
    shapes: ModelShapes
    activations: Activations
    ranks: tuple[tuple[Block, ...], ...]  # per pipeline rank
    element_bytes: int
    accumulation_dtype: str

    @property
    def is_megatron(self) -> bool:
        return runs_megatron(self.recipe, self.strategy)

    @property
    def tokens(self) -> int:
        """b x S: tokens of one micro-batch."""
        return self.strategy.micro_batch_size * self.recipe.training.sequence_length

    def has_head(self, rank: int) -> bool:
        return any(block.start < block.stop == len(self.graph.layers) for block in self.ranks[rank])

    def decoder_layers(self, block: Block) -> int:
        """Of the block: all its layers but the embedding and the head."""
        ends = (block.start == 0) + (block.stop == len(self.graph.layers))
        return max(0, block.stop - block.start - ends)

    def numel(self, rank: int) -> int:
        """Parameters of one rank of this pipeline rank; a tied tensor that is on it twice counts once."""
        blocks = self.ranks[rank]
        numel = self.shapes.numel
        total = sum(numel[b.stop] - numel[b.start] for b in blocks)
        both = blocks[0].start == 0 and self.has_head(rank)
        return total - (self.shapes.shared_numel if both else 0)


def make_layout(
    recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy, constants: Constants
) -> Layout:
    element_bytes = ELEMENT_BYTES[recipe.training.precision]
    sequence_length, checkpointing = recipe.training.sequence_length, strategy.activation_checkpointing
    return Layout(
        recipe=recipe,
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        constants=constants,
        shapes=model_shapes(graph, strategy.tensor),
        activations=activations(graph, sequence_length, element_bytes, checkpointing, recipe.assume.kernels),
        ranks=_blocks(graph, strategy, sequence_length),
        element_bytes=element_bytes,
        accumulation_dtype=accumulation_dtype(recipe.training),
    )


def _blocks(graph: ModelGraph, strategy: Strategy, sequence_length: int) -> tuple[tuple[Block, ...], ...]:
    """Micro-batches in flight: 1F1B keeps min(p - rank, m); DualPipeV (arXiv 2412.19437 and its V-shaped cut) keeps
    min(2p - rank, m) of the outward half and min(rank + 1, m) of the returning one; interleaving by v adds the share
    (p - 1) / (p v) (arXiv 2205.05198)."""
    p, m = strategy.pipeline, strategy.gradient_accumulation_steps
    if most_stages(graph) >= strategy.stages:
        parts = cut_layers(graph, sequence_length, strategy.stages, strategy.schedule)
    else:
        parts = _thin(len(graph.layers), strategy.stages)
    if strategy.schedule == "dualpipev":
        return tuple(
            (
                Block(start=parts[r], stop=parts[r + 1], in_flight=min(2 * p - r, m)),
                Block(start=parts[2 * p - 1 - r], stop=parts[2 * p - r], in_flight=min(r + 1, m)),
            )
            for r in range(p)
        )
    v = strategy.virtual_stages
    extra = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return tuple((Block(start=parts[r], stop=parts[r + 1], in_flight=min(p - r, m) * extra),) for r in range(p))


def _thin(layers: int, stages: int) -> tuple[int, ...]:
    """More stages than layers is forbidden, but numbers are still given: some stages are empty."""
    return (*(min(s, layers) for s in range(stages)), layers)
