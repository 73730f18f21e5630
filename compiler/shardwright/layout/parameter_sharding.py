"""Describe which layers are on which stage, and how each parameter is sharded over tensor ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.recipe.literal_types import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStages:
    """Assign layers to stages: stage s holds ModelGraph.layers[boundaries[s]:boundaries[s+1]].

    With DualPipeV, pipeline rank r holds stages r and 2p-1-r of 2 x pipeline stages. With `virtual`
    stages it holds each p-th stage from r on.
    """

    boundaries: tuple[int, ...]
    schedule: Schedule
    virtual: int = 1

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def stages_of_pipeline_rank(self, rank: int) -> tuple[int, ...]:
        if PIPELINE_SCHEDULES[self.schedule].is_v_shaped:
            return (rank, self.stages - 1 - rank)
        return tuple(range(rank, self.stages, self.stages // self.virtual))

    def verify(self, layers: int) -> None:
        """Raise ValueError unless the boundaries split `layers` into non-empty stages."""
        b = self.boundaries
        if b[0] != 0 or b[-1] != layers or any(x >= y for x, y in itertools.pairwise(b)):
            raise ValueError(f"boundaries {b} do not split {layers} layers into non-empty stages")


def shard_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Return near-even shards; the first `total % degree` ranks hold one element more.

    DeepSpeed's get_shard_size_list does the same with no head count and a grain of one
    (module_inject/tp_shard.py).
    """
    return tuple(total // degree + (1 if rank < total % degree else 0) for rank in range(degree))


def padded_shard_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Return shards of ceil(total / degree); the last ranks hold the rest.

    A table padded to a multiple of the ranks is sharded like this.
    """
    size = -(-total // degree)
    return tuple(max(0, min(size, total - rank * size)) for rank in range(degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """Describe how one parameter, in Hugging Face's own layout, is sharded over tensor ranks.

    dimension: the sharded dimension; None where every tensor rank holds the unsharded parameter
    blocks: sizes along `dimension` of blocks that are sharded one by one (fused qkv has three)
    sizes: elements along `dimension`, by tensor rank
    copies: consecutive tensor ranks that hold the same shard (fewer key/value heads than ranks) and
        sum its gradients; sum(sizes) = copies x the full size
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    blocks: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1

    def shard_shape(self, tensor_rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor rank's shard."""
        if self.dimension is None:
            return self.shape
        return tuple(
            self.sizes[tensor_rank] if d == self.dimension else n for d, n in enumerate(self.shape)
        )

    def shard_numel(self, tensor_rank: int) -> int:
        """Return the elements of a tensor rank's shard."""
        return math.prod(self.shard_shape(tensor_rank))

    def shard_ranges(self, tensor_rank: int) -> tuple[tuple[int, int], ...]:
        """Return (start, length) along `dimension` of the full parameter, in the rank's order."""
        shards, shard_index = len(self.sizes) // self.copies, tensor_rank // self.copies
        if len(self.blocks) == 1:  # as uneven as `sizes` says
            distinct = self.sizes[:: self.copies]
            return ((sum(distinct[:shard_index]), distinct[shard_index]),)
        ranges: list[tuple[int, int]] = []
        offset = 0
        for block in self.blocks:
            sizes = shard_sizes(block, shards)
            ranges.append((offset + sum(sizes[:shard_index]), sizes[shard_index]))
            offset += block
        return tuple(ranges)

    def verify(self) -> None:
        """Raise ValueError unless the shards cover the parameter."""
        if self.dimension is None:
            return
        if (
            not 0 <= self.dimension < len(self.shape)
            or self.copies < 1
            or len(self.sizes) % self.copies
        ):
            raise ValueError(
                f"{self.name}: {self.shape} cannot be sharded at dimension {self.dimension}"
            )
        full = self.shape[self.dimension]
        covers_all = sum(self.sizes) == self.copies * full and sum(self.blocks) == full
        if not covers_all or any(
            sum(n for _, n in self.shard_ranges(r)) != size for r, size in enumerate(self.sizes)
        ):
            raise ValueError(
                f"{self.name}: shards {self.sizes} do not cover dimension {self.dimension} of "
                f"{self.shape}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """Describe what one module communicates, and how its parameters are sharded.

    module: dotted Hugging Face path, "model.layers.0.self_attn.q_proj"
    style: one of transformers' (colwise, rowwise, moe_tp_experts...) or of this project's:
        vocabulary_embedding, vocabulary_head, replicated, or local_heads (head counts kept as
        attributes become the rank's share)
    parameters: those that the module owns; () where only its style matters
    """

    module: str
    style: str
    parameters: tuple[ParameterSharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelMap:
    """List every module that owns parameters, in model order, then those that only a style names.

    kind: sharded (by transformers' plan, or by a map of this project) | fallback (each linear
        sharded by itself, its output gathered) | none (degree 1)
    sharded_fraction: sharded share of the decoder layers' elements in parameters of two and more
        dimensions
    vocabulary_sizes: logits of each tensor rank; () where every rank has them all
    """

    degree: int
    kind: str
    sharded_fraction: float
    vocabulary_sizes: tuple[int, ...]
    modules: tuple[ModuleSharding, ...]

    def verify(self) -> None:
        """Raise ValueError where a parameter is not sharded over `degree` ranks."""
        for module in self.modules:
            for p in module.parameters:
                p.verify()
                if p.dimension is not None and len(p.sizes) != self.degree:
                    raise ValueError(
                        f"{p.name} is sharded over {len(p.sizes)} ranks, not {self.degree}"
                    )
