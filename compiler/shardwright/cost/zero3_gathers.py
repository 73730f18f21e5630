"""Weights that ZeRO-3 leaves whole on each rank, and so does not gather again.

DeepSpeed releases a module's weights unless they come up again before LIVE_NUMEL elements of others
do (zero/partitioned_param_coordinator.py, __params_to_release; stage3_max_reuse_distance): the last
layers stay from their forward to their backward pass, and so does of a layer that is recomputed
what is behind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.layout.zero_buckets import LIVE_NUMEL
from shardwright.utils.memoize import memoize


class UnshardedWeights(NamedTuple):
    """Elements of a rank: those that are gathered again between a micro-batch's forward and
    backward pass, and those that are whole when the forward pass ends."""

    again: float
    kept: float


def backward_gather_fraction(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Of a pipeline rank's parameters the share that is gathered for the backward pass, beside all
    of them for the forward pass. PyTorch's FSDP gathers all of them twice."""
    if layout.traits.zero3_gathers_flat_layers:
        return 1.0
    held = layout.numel_of_chunks(blocks) - layout.expert_numel_of(blocks) * (
        1 - 1 / layout.strategy.expert
    )
    return unsharded_weights(layout, blocks).again / held if held else 0.0


def _depends_on(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> Hashable:
    spans = [(b.start, b.stop, _recomputed_until(layout, b)) for b in blocks]
    return layout.graph.identity, layout.strategy.tensor, layout.strategy.expert, LIVE_NUMEL, *spans


@memoize(_depends_on)
def unsharded_weights(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> UnshardedWeights:
    again = kept = between = (
        0.0  # between: elements that come up after a layer's forward pass and before its next use
    )
    for block in reversed(blocks):
        until = _recomputed_until(layout, block)
        for at in reversed(range(block.start, block.stop)):
            modules = _modules(layout, blocks, at)
            own, behind, recomputed = (
                sum(modules),
                0.0,
                layout.shapes.kind_of[at] >= 0 and at < until,
            )
            for numel in reversed(modules):
                # All of the layer comes up from a module's forward pass to where it is recomputed,
                # but for itself.
                released = between + (own - numel if recomputed else 2 * behind) >= LIVE_NUMEL
                kept += numel * (not released)
                # The last module stays: recomputation ends inside it.
                again += numel * (
                    released + (recomputed and behind > 0 and 2 * behind >= LIVE_NUMEL)
                )
                behind += numel
            between += (3 if recomputed else 2) * own
    return UnshardedWeights(again, kept)


def _recomputed_until(layout: PricedLayout, block: ModelChunk) -> int:
    if layout.checkpointed_activations is not None:
        return layout.checkpointed_stop(block.start, block.stop)
    return block.stop if layout.strategy.checkpointing == "full" else block.start


def _modules(layout: PricedLayout, blocks: tuple[ModelChunk, ...], at: int) -> list[float]:
    """Elements of a layer's matrices on a device, in their order; experts' are one module. The rest
    of its parameters counts with the first."""
    shapes, expert = layout.shapes, layout.strategy.expert
    numel = float(shapes.numel[at + 1] - shapes.numel[at])
    if shapes.kind_of[at] < 0:
        tied = at == 0 and layout.has_head(blocks)  # it came with the head
        return [numel - shapes.shared_numel * tied]
    kind = shapes.kinds[shapes.kind_of[at]]
    sizes = [float(p.n * p.k) for p in kind.products if p.batch == 1]
    if kind.expert_numel:
        sizes.append(kind.expert_numel / expert)
    rest = numel - kind.expert_numel * (1 - 1 / expert) - sum(sizes)
    return [sizes[0] + rest, *sizes[1:]] if sizes else [rest]
