"""Stage 5's output: which layers are on which stage, and how each module is split over tensor ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """boundaries: len = stages + 1; stage s holds layers[boundaries[s]:boundaries[s+1]] of ModelGraph.layers.

    With DualPipeV there are 2 x pipeline stages and pipeline rank r holds stages r and 2p-1-r.
    """

    boundaries: tuple[int, ...]
    schedule: str

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    def stages_of_pipeline_rank(self, rank: int) -> tuple[int, ...]:
        return (rank, self.stages - 1 - rank) if self.schedule == "dualpipev" else (rank,)

    def verify(self, layers: int) -> None:
        b = self.boundaries
        if b[0] != 0 or b[-1] != layers or any(x >= y for x, y in itertools.pairwise(b)):
            raise ValueError(f"boundaries {b} do not cut {layers} layers into non-empty stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """How one parameter (in HF's own layout) is cut over tensor ranks.

    dimension: the cut one, or None where every tensor rank holds the whole.
    blocks: sizes along `dimension` that are cut one by one (fused qkv: three); one block where not fused.
    sizes: per tensor rank, elements along `dimension` (their sum is the full size).
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None
    blocks: tuple[int, ...]
    sizes: tuple[int, ...]

    def shard_shape(self, tensor_rank: int) -> tuple[int, ...]:
        if self.dimension is None:
            return self.shape
        return tuple(self.sizes[tensor_rank] if d == self.dimension else n for d, n in enumerate(self.shape))

    def shard_numel(self, tensor_rank: int) -> int:
        return math.prod(self.shard_shape(tensor_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSplit:
    """style: one of transformers' (colwise, colwise_gather_output, rowwise, rowwise_split_input, packed_colwise,
    replicated_with_grad_allreduce), or vocabulary_embedding | vocabulary_head | replicated."""

    module: str  # dotted HF path, "model.layers.0.self_attn.q_proj"
    style: str
    parameters: tuple[ParameterSplit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelMap:
    """Every module that owns parameters, in model order. sharded_fraction: share of decoder-layer 2-D
    parameters (elements) that are cut."""

    degree: int
    modules: tuple[ModuleSplit, ...]
    sharded_fraction: float

    def verify(self) -> None:
        for module in self.modules:
            for p in module.parameters:
                if p.dimension is not None and (
                    sum(p.sizes) != p.shape[p.dimension]
                    or sum(p.blocks) != p.shape[p.dimension]
                    or len(p.sizes) != self.degree
                ):
                    raise ValueError(f"{p.name}: {p.sizes} do not cut {p.shape} at dimension {p.dimension}")
