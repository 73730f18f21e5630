"""Seconds that offloaded states add to a step: the link to the host, and Adam on its memory (arXiv
2101.06840)."""

from __future__ import annotations

from shardwright.cost.priced_layout import PricedLayout

# Per updated parameter: master, two moments read and written, gradient read, half-precision copy
# written.
HOST_ADAM_BYTES = 6 * 4 + 4 + 2
# A micro-batch of `offload: parameters` fetches its share twice, for the forward and for the
# backward pass.
FETCHES = 2


def cpu_optimizer_seconds(layout: PricedLayout, numel: float) -> float:
    """The update of a rank's share of so many parameters on the CPU (the node's GPUs share its
    memory), and the way back to the GPU. In a pipeline and at ZeRO-1 gradients go to the host once
    a step, after the last backward pass."""
    s, c = layout.strategy, layout.constants
    updated = numel / s.shards
    rate = (
        c.host_bytes_per_second
        if s.gradient_accumulation_steps == 1
        else c.accumulated_host_bytes_per_second
    )
    adam = HOST_ADAM_BYTES * updated * layout.cluster.gpus_per_node / rate
    copies = 0 if s.offload == "parameters" else 1
    if _once_a_step(layout):
        copies += 1 + (FETCHES * s.gradient_accumulation_steps if s.offload == "parameters" else 0)
    return adam + copies * updated * layout.element_bytes / c.host_link_bytes_per_second


def _once_a_step(layout: PricedLayout) -> bool:
    return layout.strategy.pipeline > 1 or layout.strategy.zero_stage <= 1


def host_transfer_seconds(layout: PricedLayout, rank: int, compute_seconds: float) -> float:
    """Exposed, of one step: at each micro-batch gradients go to the host, and parameters come from
    it, behind the compute as far as it reaches."""
    s, c = layout.strategy, layout.constants
    if _once_a_step(layout):
        return 0.0
    moved = (
        (1 + (FETCHES if s.offload == "parameters" else 0))
        * layout.numel(rank)
        / s.shards
        * layout.element_bytes
    )
    each = moved / c.host_link_bytes_per_second
    return s.gradient_accumulation_steps * (
        each - c.overlap(layout.traits.traffic) * min(each, compute_seconds)
    )
