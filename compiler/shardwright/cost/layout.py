"""What memory and time both need to know about one layout: blocks per pipeline rank, shapes, dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.cost.activations import Activations
from shardwright.cost.constants import Constants
from shardwright.cost.shapes import ModelShapes
from shardwright.engines.engine import Traits
from shardwright.engines.table import traits_of
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.layout.loss_chunk import chunk_length
from shardwright.layout.strategy import Strategy


class Block(NamedTuple):  # a search makes tens of thousands; a frozen dataclass takes four times as long
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
    ranks: tuple[tuple[Block, ...], ...]  # per pipeline rank; () until the layers are placed
    element_bytes: int
    accumulation_dtype: str
    adapters: tuple[int, ...] = ()  # LoRA's elements, prefix sums over graph.layers; () where all is trained

    @property
    def traits(self) -> Traits:
        return traits_of(self.recipe.target, self.recipe.assume.kernels, self.strategy)

    @property
    def tokens(self) -> int:
        """b x S: tokens of one micro-batch."""
        return self.strategy.micro_batch_size * self.recipe.training.sequence_length

    @property
    def logit_tokens(self) -> int:
        """Tokens of a micro-batch whose logits exist at a time."""
        if self.strategy.loss == "full":
            return self.tokens
        micro_batch = self.strategy.micro_batch_size
        return micro_batch * chunk_length(micro_batch, self.recipe.training.sequence_length)

    def has_head(self, blocks: tuple[Block, ...]) -> bool:
        layers = len(self.graph.layers)
        return any(block.start < block.stop == layers for block in blocks)

    def decoder_layers(self, block: Block) -> int:
        """Of the block: all its layers but the embedding and the head."""
        ends = (block.start == 0) + (block.stop == len(self.graph.layers))
        return max(0, block.stop - block.start - ends)

    def numel(self, rank: int) -> int:
        """Parameters of one rank of this pipeline rank."""
        return self.numel_of(self.ranks[rank])

    def trained_of(self, blocks: tuple[Block, ...]) -> int:
        """Those of them that have a gradient; LoRA's adapters are not among numel_of."""
        if not self.adapters:
            return self.numel_of(blocks)
        return sum(self.adapters[b.stop] - self.adapters[b.start] for b in blocks)

    def numel_of(self, blocks: tuple[Block, ...]) -> int:
        """Parameters of a rank with these blocks; a tied tensor that is on it twice counts once."""
        numel = self.shapes.numel
        total = sum([numel[b.stop] - numel[b.start] for b in blocks])
        shared = self.shapes.shared_numel
        return total - (shared if shared and blocks[0].start == 0 and self.has_head(blocks) else 0)
