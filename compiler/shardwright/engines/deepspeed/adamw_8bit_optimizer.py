"""Update weights by AdamW with 8-bit moments (arXiv 2110.02861) under DeepSpeed's ZeRO 0 to 3.

Blocks are those of a weight, not of a flat master, so that every layout quantizes as one process
does. Where ZeRO's partitions cut a block, its ranks share the largest magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.weight_shards import (
    FlatMastersOptimizer,
    MastersGroups,
    OwnedElements,
    WeightShard,
    locate,
    sharing_ranks,
)
from shardwright.engines.trainer_protocol import OwnedShard, state_name
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.quantized_moments import BLOCK, CHUNK_BLOCKS, is_quantized
from shardwright.parallel.block_quantization import block_scales, dequantized, quantized
from shardwright.plan.plan import Plan

MOMENTS = OPTIMIZERS["adamw_8bit"].moments


def _scale(moment: str) -> str:
    return f"{moment}_scale"


@dataclass(slots=True)
class EightBitWeight:
    """Hold a weight's place and its moments.

    is_quantized: the moments are codes, with a scale for each block that this rank touches
    cut: blocks of the tensor shard that several ranks share, the same on all of them
    """

    shard: WeightShard
    is_expert: bool
    is_quantized: bool
    cut: tuple[int, ...]
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def first_block(self) -> int:
        return self.shard.start // BLOCK

    @property
    def block_count(self) -> int:
        return -(-(self.shard.start + self.shard.numel) // BLOCK) - self.first_block

    def spans(self, blocks: range) -> tuple[int, int, int, int]:
        """Return where blocks (of this rank's, from 0) are: begin and end of this rank's elements,
        and how many elements of the first and of the last block are other ranks'."""
        start = self.shard.start - self.first_block * BLOCK
        begin = max(0, blocks.start * BLOCK - start)
        end = min(self.shard.numel, blocks.stop * BLOCK - start)
        before = start + begin - blocks.start * BLOCK
        return begin, end, before, len(blocks) * BLOCK - before - (end - begin)

    def moments(self, blocks: range, gradient: torch.Tensor, betas: tuple[float, float]) -> Moments:
        """Return the new moments of these blocks (count, BLOCK), zero where other ranks' are."""
        begin, end, before, after = self.spans(blocks)
        found = []
        slope = _padded(gradient[begin:end], before, after)
        for moment, beta, value in zip(MOMENTS, betas, (slope, slope.square()), strict=True):
            codes = _padded(self.states[moment][begin:end], before, after)
            scales = self.states[_scale(moment)][blocks.start : blocks.stop]
            old = dequantized(codes, scales, _is_signed(moment)).lerp_(value, 1 - beta)
            flat = old.view(-1)
            flat[:before] = 0
            flat[flat.numel() - after :] = 0
            found.append(old)
        return found[0], found[1]


Moments = tuple[torch.Tensor, torch.Tensor]


def _is_signed(moment: str) -> bool:
    return moment == MOMENTS[0]


def _padded(own: torch.Tensor, before: int, after: int) -> torch.Tensor:
    if before or after:
        own = torch.nn.functional.pad(own, (before, after))
    return own.view(-1, BLOCK)


class ShardedAdamW8bit(FlatMastersOptimizer[EightBitWeight]):
    """Update the weights in flat masters."""

    def bind(
        self,
        plan: Plan,
        masters: MastersGroups,
        owned: Mapping[str, OwnedElements],
        transposed: frozenset[str],
    ) -> None:
        self._sharing = sharing_ranks(plan, same_tensor_rank=True)
        everyone: list[dict[str, tuple[int, int]]] = [{} for _ in plan.ranks]
        mine = {name: (e.start, e.start + e.numel) for name, e in owned.items() if e.numel}
        dist.all_gather_object(everyone, mine)
        self._held = {master: [] for master in masters}
        for shard in locate(plan, owned, transposed):
            experts = plan.expert_shard_count(shard.name)
            ranks = self._sharing[experts > 1].ranks
            ends = {at for r in ranks for at in everyone[r].get(shard.name, ())}
            of_blocks = is_quantized(shard.full_numel * experts)
            weight = EightBitWeight(
                shard=shard,
                is_expert=experts > 1,
                is_quantized=of_blocks,
                cut=tuple(sorted({at // BLOCK for at in ends if at % BLOCK})) if of_blocks else (),
            )
            device = owned[shard.name].master.device
            for moment in MOMENTS:
                dtype = torch.uint8 if of_blocks else torch.float32
                weight.states[moment] = torch.zeros(shard.numel, dtype=dtype, device=device)
                if of_blocks:
                    count = weight.block_count if shard.numel else 0
                    weight.states[_scale(moment)] = torch.zeros(count, device=device)
            self.weights[shard.name] = weight
            self._held[owned[shard.name].master].append(weight)

    def element_states(self, name: str) -> dict[str, torch.Tensor]:
        states = self.weights[name].states
        return {moment: states[moment] for moment in MOMENTS}

    def state_shards(self, plan: Plan, copied: frozenset[str]) -> Iterator[OwnedShard]:
        """Yield the scales of each quantized weight's blocks; two ranks save a block that they
        share."""
        for name, weight in self.weights.items():
            if not weight.is_quantized or not weight.shard.numel:
                continue
            for moment in MOMENTS:
                scales = weight.states[_scale(moment)]
                yield OwnedShard(
                    name=state_name(name, _scale(moment)),
                    shard_shape=(torch.Size(weight.shard.shard_shape).numel() // BLOCK,),
                    start=weight.first_block,
                    states={"value": scales},
                    live=scales,
                    partitioned=plan.strategy.zero_stage > 0,
                    copied=name in copied,
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters in `param_groups`, of which DeepSpeed's engines leave one at a
        time."""
        groups = {p: g for g in self.param_groups for p in g["params"] if p in self._held}
        weights = [(master, w) for master in groups for w in self._held[master]]
        self._count_update(groups)
        largest = self._largest_of_cut_blocks(weights)
        for master, weight in weights:
            if weight.shard.numel and master.grad is not None:
                flats = master.view(-1), master.grad.view(-1)
                own, gradient = (weight.shard.own(flat) for flat in flats)
                update = _Update(
                    self._keys.betas, self._keys.eps, groups[master], self.state[master]
                )
                if weight.is_quantized:
                    self._update_blocks(weight, own, gradient, update, largest)
                else:
                    moments = [weight.states[moment] for moment in MOMENTS]
                    moments[0].lerp_(gradient, 1 - update.betas[0])
                    moments[1].lerp_(gradient.square(), 1 - update.betas[1])
                    update.apply(own, moments[0], moments[1])

    def _update_blocks(
        self,
        weight: EightBitWeight,
        own: torch.Tensor,
        gradient: torch.Tensor,
        update: _Update,
        largest: Mapping[tuple[str, int], torch.Tensor],
    ) -> None:
        for first in range(0, weight.block_count, CHUNK_BLOCKS):
            blocks = range(first, min(first + CHUNK_BLOCKS, weight.block_count))
            begin, end, before, _ = weight.spans(blocks)
            found = weight.moments(blocks, gradient, update.betas)
            for at, (moment, values) in enumerate(zip(MOMENTS, found, strict=True)):
                magnitudes = values.abs().amax(-1)
                for block in (weight.first_block + blocks[0], weight.first_block + blocks[-1]):
                    if (shared := largest.get((weight.shard.name, block))) is not None:
                        magnitudes[block - weight.first_block - first] = shared[at]
                scales = block_scales(magnitudes)
                codes = quantized(values, scales, _is_signed(moment)).view(-1)
                weight.states[moment][begin:end] = codes[before : before + end - begin]
                weight.states[_scale(moment)][blocks.start : blocks.stop] = scales
            moments = (each.view(-1)[before : before + end - begin] for each in found)
            update.apply(own[begin:end], *moments)

    def _largest_of_cut_blocks(
        self, weights: list[tuple[torch.Tensor, EightBitWeight]]
    ) -> dict[tuple[str, int], torch.Tensor]:
        """Return the largest magnitude of each moment in the blocks that ranks share, by weight and
        block. Collective."""
        found: dict[tuple[str, int], torch.Tensor] = {}
        for is_expert, sharing in self._sharing.items():
            cut = [
                (master, weight, block)
                for master, weight in weights
                if weight.is_expert == is_expert
                for block in weight.cut
            ]
            if not cut:
                continue
            largest = torch.zeros(len(cut), len(MOMENTS), device=cut[0][0].device)
            for at, (master, weight, block) in enumerate(cut):
                here = block - weight.first_block
                owns = weight.shard.numel and 0 <= here < weight.block_count
                if owns and master.grad is not None:
                    gradient = weight.shard.own(master.grad.view(-1))
                    moments = weight.moments(range(here, here + 1), gradient, self._keys.betas)
                    largest[at] = torch.stack([values.abs().amax() for values in moments])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=sharing.group)
            found |= {(w.shard.name, block): largest[at] for at, (_, w, block) in enumerate(cut)}
        return found


@dataclass(frozen=True, slots=True)
class _Update:
    """Hold what an update has beside the moments."""

    betas: tuple[float, float]
    eps: float
    group: Mapping[str, Any]
    state: Mapping[str, Any]

    def apply(self, own: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Update weights by fp32 moments with decoupled weight decay, in place."""
        rate, step = self.group["lr"], self.state["step"]
        own.mul_(1 - rate * self.group["weight_decay"])
        root = (second.sqrt() / (1 - self.betas[1] ** step) ** 0.5).add_(self.eps)
        own.addcdiv_(first, root, value=-rate / (1 - self.betas[0] ** step))
