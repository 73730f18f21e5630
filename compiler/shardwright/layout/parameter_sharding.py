"""Stage 5's output: which layers are on which stage, and how each module is split over tensor
ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.recipe.literal_types import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStages:
    """boundaries: len = stages + 1; stage s holds layers[boundaries[s]:boundaries[s+1]] of
    ModelGraph.layers.

    With DualPipeV there are 2 x pipeline stages and pipeline rank r holds stages r and 2p-1-r; with
    `virtual` ones a rank each p-th stage, from r.
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
        b = self.boundaries
        if b[0] != 0 or b[-1] != layers or any(x >= y for x, y in itertools.pairwise(b)):
            raise ValueError(f"boundaries {b} do not cut {layers} layers into non-empty stages")


def shard_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Near-even shards, the first `total % degree` ranks one larger.

    As DeepSpeed's get_shard_size_list with no head count and a grain of one
    (module_inject/tp_shard.py).
    """
    return tuple(total // degree + (1 if rank < total % degree else 0) for rank in range(degree))


def padded_shard_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Shards of ceil(total / degree), the last ones with what is left: as a table is cut that is
    padded to a multiple of the ranks."""
    each = -(-total // degree)
    return tuple(max(0, min(each, total - rank * each)) for rank in range(degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """How one parameter (in HF's own layout) is cut over tensor ranks.

    dimension: the cut one, or None where every tensor rank holds the whole. blocks: sizes along
    `dimension` that are cut one by one (fused qkv: three); one block where not fused. sizes: per
    tensor rank, elements along `dimension`. copies: consecutive tensor ranks that hold the same
    shard (key/value heads, fewer than the ranks); their gradients
        are summed. sum(sizes) = copies x the full size.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    blocks: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1

    def shard_shape(self, tensor_rank: int) -> tuple[int, ...]:
        if self.dimension is None:
            return self.shape
        return tuple(
            self.sizes[tensor_rank] if d == self.dimension else n for d, n in enumerate(self.shape)
        )

    def shard_numel(self, tensor_rank: int) -> int:
        return math.prod(self.shard_shape(tensor_rank))

    def pieces(self, tensor_rank: int) -> tuple[tuple[int, int], ...]:
        """(start, length) along `dimension` in the full parameter, in the order in which the rank
        holds them."""
        shards, shard_index = len(self.sizes) // self.copies, tensor_rank // self.copies
        if len(self.blocks) == 1:  # as uneven as `sizes` says
            distinct = self.sizes[:: self.copies]
            return ((sum(distinct[:shard_index]), distinct[shard_index]),)
        found: list[tuple[int, int]] = []
        offset = 0
        for block in self.blocks:
            sizes = shard_sizes(block, shards)
            found.append((offset + sum(sizes[:shard_index]), sizes[shard_index]))
            offset += block
        return tuple(found)

    def verify(self) -> None:
        if self.dimension is None:
            return
        if (
            not 0 <= self.dimension < len(self.shape)
            or self.copies < 1
            or len(self.sizes) % self.copies
        ):
            raise ValueError(f"{self.name}: no cut of {self.shape} at dimension {self.dimension}")
        full = self.shape[self.dimension]
        covers_all = sum(self.sizes) == self.copies * full and sum(self.blocks) == full
        if not covers_all or any(
            sum(n for _, n in self.pieces(r)) != size for r, size in enumerate(self.sizes)
        ):
            raise ValueError(
                f"{self.name}: {self.sizes} do not cut {self.shape} at dimension {self.dimension}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """What one module communicates (`style`), and how each parameter that it owns is cut.

    style: one of transformers' (colwise, rowwise, moe_tp_experts...), or one of ours:
    vocabulary_embedding,
        vocabulary_head, local_heads (head counts kept as attributes become the rank's share),
        replicated. A module without parameters is listed where its style asks for something.
    """

    module: str  # dotted HF path, "model.layers.0.self_attn.q_proj"
    style: str
    parameters: tuple[ParameterSharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelMap:
    """Every module that owns parameters, in model order, and those without that a style names.

    kind: sharded (transformers' plan, or a map of ours) | fallback (each linear cut by itself, its
    output gathered) |
        none (degree 1).
    vocabulary_sizes: per tensor rank, the logits that it holds; () where every rank has them all.
    sharded_fraction: share of decoder-layer parameters of two and more dimensions (elements) that
    are cut.
    """

    degree: int
    kind: str
    sharded_fraction: float
    vocabulary_sizes: tuple[int, ...]
    modules: tuple[ModuleSharding, ...]

    def verify(self) -> None:
        for module in self.modules:
            for p in module.parameters:
                p.verify()
                if p.dimension is not None and len(p.sizes) != self.degree:
                    raise ValueError(f"{p.name} is cut for {len(p.sizes)} ranks, not {self.degree}")
