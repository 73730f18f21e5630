"""Peak memory per pipeline rank. First-order.

States: ZeRO (arXiv 1910.02054) - parameters, gradients and Adam's float32 master and moments, cut by the data degree
d from stage 1 (optimizer), 2 (gradients), 3 (parameters). Activations: arXiv 2205.05198.
"""

from __future__ import annotations

from shardwright.cost.constants import (
    BUCKET_ELEMENTS,
    CPU_FRAMEWORK_BYTES,
    FRAGMENTATION,
    FRAMEWORK_BYTES,
    LOGIT_BYTES,
    MEMORY_HEADROOM,
)
from shardwright.cost.layout import ELEMENT_BYTES, Layout
from shardwright.ir.estimate import Memory, StageMemory


def estimate_memory(layout: Layout) -> Memory:
    """Bytes as nvidia-smi would show them, per pipeline rank; `fits` honours memory_headroom and ignore_memory."""
    stages = tuple(_rank_memory(layout, rank) for rank in range(layout.strategy.pipeline))
    peak = max(stage.peak_bytes for stage in stages)
    capacity = layout.cluster.capacity_bytes
    headroom = layout.recipe.parallelism.memory_headroom
    usable = capacity * (1 - (MEMORY_HEADROOM if headroom is None else headroom))
    fits = peak <= usable or layout.recipe.assume.ignore_memory
    return Memory(peak_bytes=peak, capacity_bytes=capacity, fits=fits, stages=stages)


def _rank_memory(layout: Layout, rank: int) -> StageMemory:
    s = layout.strategy
    numel, element = layout.numel(rank), layout.element_bytes
    parameters = numel * element / (s.data if s.zero_stage >= 3 else 1)
    gradients = numel * _gradient_bytes(layout) / (s.data if s.zero_stage >= 2 else 1)
    # Two float32 moments, and a float32 master copy (which ZeRO keeps for float32 parameters too).
    master = 0 if layout.recipe.training.precision == "fp32" and s.zero_stage == 0 else 4
    optimizer = numel * (8 + master) / (s.data if s.zero_stage >= 1 else 1)
    if s.offload in ("optimizer", "parameters"):
        optimizer = 0.0
    if s.offload == "parameters":
        parameters = 0.0
    activations = sum(
        _kept_bytes(layout, block.of(layout.totals.decoder_layers)) * block.in_flight for block in layout.ranks[rank]
    )
    framework = CPU_FRAMEWORK_BYTES if layout.cluster.gpu.is_cpu else FRAMEWORK_BYTES
    working = _working_bytes(layout, rank)
    fragmentation = FRAGMENTATION * (parameters + gradients + optimizer + activations + working)
    parts = [round(x) for x in (parameters, gradients, optimizer, activations, working + fragmentation + framework)]
    return StageMemory(
        stage=rank,
        parameters_bytes=parts[0],
        gradients_bytes=parts[1],
        optimizer_bytes=parts[2],
        activations_bytes=parts[3],
        workspace_bytes=parts[4],
        peak_bytes=sum(parts),
    )


def _gradient_bytes(layout: Layout) -> int:
    """Per parameter: the gradient itself, and the float32 buffer beside it where half precision accumulates in fp32
    (BF16_Optimizer at stage 1; stages 2 and 3 accumulate in the partition alone)."""
    accumulation = ELEMENT_BYTES[layout.accumulation_dtype]
    if accumulation == layout.element_bytes or layout.strategy.zero_stage >= 2:
        return accumulation
    return layout.element_bytes + accumulation


def _layer_elements(layout: Layout, *, attention: bool) -> float:
    """Activation elements per token of one decoder layer on one tensor rank, with or without the attention module."""
    s, totals = layout.strategy, layout.totals
    replicated = totals.layer_elements_replicated / (s.tensor if s.sequence_parallel else 1)
    elements = replicated + totals.layer_elements_other / s.tensor
    if attention:
        elements += totals.layer_elements_attention / s.tensor
        if layout.graph.attention == "eager":
            elements += totals.layer_scores * layout.recipe.training.sequence_length / s.tensor
    return elements


def _kept_bytes(layout: Layout, decoder_layers: int) -> float:
    """What one micro-batch keeps for its backward pass, on a block of this many decoder layers."""
    s = layout.strategy
    boundary = layout.graph.hidden_size / (s.tensor if s.sequence_parallel else 1)
    match s.activation_checkpointing:
        case "full":
            elements = boundary * decoder_layers
        case "selective":
            elements = _layer_elements(layout, attention=False) * decoder_layers
        case _:
            elements = _layer_elements(layout, attention=True) * decoder_layers
    # The block's own input and output, held for the neighbours while the micro-batch is in flight.
    buffers = 2 * boundary if s.pipeline > 1 else 0.0
    return (elements + buffers) * layout.tokens * layout.element_bytes


def _working_bytes(layout: Layout, rank: int) -> float:
    """Short-lived: the layer being recomputed, the loss over the vocabulary, communication buckets, gathered layers."""
    s, totals, tokens = layout.strategy, layout.totals, layout.tokens
    total = 0.0
    if s.activation_checkpointing == "full":
        total += _layer_elements(layout, attention=True) * tokens * layout.element_bytes
    elif s.activation_checkpointing == "selective":
        attention = _layer_elements(layout, attention=True) - _layer_elements(layout, attention=False)
        total += attention * tokens * layout.element_bytes
    if layout.has_head(rank):
        total += tokens * (
            LOGIT_BYTES * layout.graph.vocabulary_size / s.tensor + totals.head_elements * layout.element_bytes
        )
    if s.zero_stage >= 1 and s.data > 1:
        total += min(BUCKET_ELEMENTS, layout.numel(rank)) * layout.element_bytes
    if s.zero_stage >= 3 and s.data > 1:
        total += 2 * totals.layer_numel * layout.element_bytes  # the layer in use and the one fetched ahead
    return total
