"""Peak memory per pipeline rank. First-order.

States: ZeRO (arXiv 1910.02054) - parameters, gradients and Adam's float32 master and moments, cut by the data degree
d from stage 1 (optimizer), 2 (gradients), 3 (parameters). Activations: arXiv 2205.05198.
"""

from __future__ import annotations

from shardwright.cost.activations import Share
from shardwright.cost.compute import ELEMENT_BYTES
from shardwright.cost.layout import Block, Layout
from shardwright.ir.estimate import Memory, StageMemory


def estimate_memory(layout: Layout) -> Memory:
    """Bytes as nvidia-smi would show them, per pipeline rank; `fits` honours memory_headroom and ignore_memory."""
    usable = usable_bytes(layout)
    stages = tuple(rank_memory(layout, rank, usable) for rank in range(layout.strategy.pipeline))
    peak = max(stage.peak_bytes for stage in stages)
    fits = peak <= usable or layout.recipe.assume.ignore_memory
    return Memory(peak_bytes=peak, capacity_bytes=layout.cluster.capacity_bytes, fits=fits, stages=stages)


def usable_bytes(layout: Layout) -> int:
    """What the driver and a pinned memory_headroom leave of a device."""
    driver = 0.0 if layout.cluster.gpu.is_cpu else layout.constants.driver_share
    headroom = layout.recipe.parallelism.memory_headroom or 0.0
    return int(layout.cluster.capacity_bytes * (1 - max(driver, headroom)))


def rank_memory(layout: Layout, rank: int, usable: int) -> StageMemory:
    s = layout.strategy
    numel, element = layout.numel(rank), layout.element_bytes
    parameters = numel * element / (s.data if s.zero_stage >= 3 else 1)
    gradients = numel * _gradient_bytes(layout) / (s.data if s.zero_stage >= 2 else 1)
    # Two float32 moments, and a float32 master copy (which ZeRO keeps for float32 parameters too).
    master = 0 if layout.recipe.training.precision == "fp32" and s.zero_stage == 0 else 4
    optimizer = numel * (8 + master) / (s.data if s.zero_stage >= 1 else 1)
    if s.offload != "none":
        optimizer = 0.0  # in host memory (arXiv 2101.06840), as are the accumulated gradients
        gradients = numel * element if s.zero_stage == 1 else 0.0
    if s.offload == "parameters":
        parameters = 0.0
    activations = sum(_kept_bytes(layout, block) * block.in_flight for block in layout.ranks[rank])
    workspace = _working_bytes(layout, rank) + _framework_bytes(layout)
    parts = [round(x) for x in (parameters, gradients, optimizer, activations, workspace)]
    live = sum(parts)
    # The allocator keeps freed blocks for later, and gives them back when the device is nearly full.
    slack = round(layout.constants.fragmentation * live)
    parts[4] += max(0, min(slack, usable - live))
    return StageMemory(
        stage=rank,
        parameters_bytes=parts[0],
        gradients_bytes=parts[1],
        optimizer_bytes=parts[2],
        activations_bytes=parts[3],
        workspace_bytes=parts[4],
        peak_bytes=sum(parts),
    )


def _framework_bytes(layout: Layout) -> float:
    """Context and communicators: the world's, and those of each way of being parallel (a pipeline has one a side)."""
    s, c = layout.strategy, layout.constants
    if layout.cluster.gpu.is_cpu:
        return c.cpu_framework_bytes
    groups = (s.world_size > 1) + (s.data > 1) + (s.tensor > 1) + 2 * (s.pipeline > 1)
    return c.context_bytes + groups * c.communicator_bytes


def _gradient_bytes(layout: Layout) -> int:
    """Per parameter: the gradient itself, and the float32 buffer beside it where half precision accumulates in fp32
    (BF16_Optimizer at stage 1; stages 2 and 3 accumulate in the partition alone)."""
    accumulation = ELEMENT_BYTES[layout.accumulation_dtype]
    if accumulation == layout.element_bytes or layout.strategy.zero_stage >= 2:
        return accumulation
    return layout.element_bytes + accumulation


def _kept_bytes(layout: Layout, block: Block) -> float:
    """What one micro-batch keeps for its backward pass on one rank, on this block's layers."""
    s = layout.strategy
    kept = layout.activations.between(block.start, block.stop)
    total = s.micro_batch_size * kept.on_rank(layout.shapes.attention_degree, sequence_parallel=s.sequence_parallel)
    if s.pipeline > 1:
        # Its output, held until the gradient comes back; DeepSpeed's pipe_partitioned keeps a share a tensor rank.
        share = 1 if s.schedule == "dualpipev" else s.tensor
        total += layout.graph.hidden_size / share * layout.tokens * layout.element_bytes
    return total


def _working_bytes(layout: Layout, rank: int) -> float:
    """Short-lived: the layer in its backward pass, or the loss over the vocabulary, whichever is more (they never
    meet), beside masks, communication buckets and gathered layers."""
    s, c, found = layout.strategy, layout.constants, layout.activations

    def held(share: Share) -> float:
        return s.micro_batch_size * share.on_rank(layout.shapes.attention_degree, sequence_parallel=s.sequence_parallel)

    layer = held(found.recomputed) + c.backward_share * held(found.largest)
    loss = 0.0
    if layout.has_head(rank):
        logits = c.logit_bytes(layout.recipe.assume.kernels) * layout.shapes.head_width
        loss = layout.tokens * logits + held(found.head)
    total = max(layer, loss) + held(found.context)
    if s.zero_stage >= 1 and s.data > 1:
        total += min(c.bucket_elements, layout.numel(rank)) * layout.element_bytes
    if s.zero_stage >= 3 and s.data > 1:
        # The layer in use and the one fetched ahead, as far as DeepSpeed lets them live together.
        layers, widest = 2 * layout.shapes.largest_layer, layout.shapes.largest_product
        total += min(layers, c.live_elements + widest) * layout.element_bytes
    accumulation = ELEMENT_BYTES[layout.accumulation_dtype]
    if accumulation < 4 and 1 <= s.zero_stage <= 2:
        # The optimizer steps on a float32 copy of its share of the gradients (DeepSpeed stage_1_and_2.py).
        total += 4 * layout.numel(rank) / s.data
    return total
