"""Time of one optimizer step. First-order.

Compute: FLOPs against the peak, and elementwise traffic against memory bandwidth. Collectives: ring, bytes x 2(n-1)/n
for an all-reduce. Pipeline: makespan = (m - 1) x slowest + one micro-batch through every stage, which is
(m + p - 1) x stage where stages are even (arXiv 2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.constants import (
    ADAM_BYTES_PER_PARAMETER,
    ATTENTION_EFFICIENCY,
    ELEMENTWISE_PASSES,
    GEMM_EFFICIENCY,
    LOGIT_BYTES,
    MICRO_BATCH_OVERHEAD_SECONDS,
    ODD_HEAD_EFFICIENCY,
    ODD_WIDTH_EFFICIENCY,
    OVERLAP,
    SCORE_PASSES,
)
from shardwright.cost.layout import ELEMENT_BYTES, Block, Layout
from shardwright.ir.estimate import Time
from shardwright.ir.strategy import Strategy

# Forward + backward, in forwards; recomputation adds its share on top.
FORWARDS_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One micro-batch, forward and backward, on one pipeline rank."""

    compute: float
    backward: float
    tensor_comm: float
    pipeline_comm: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor_comm + self.pipeline_comm


def bubble_divisor(strategy: Strategy) -> float:
    """How much shorter fill and drain are than 1F1B's p - 1 forwards and backwards.

    Interleaving by v divides them by v (arXiv 2104.04473). DeepSpeed's DualPipeV, simulated from its own instruction
    streams with backward = 2 x forward, idles 2(p - 1) - 1/2 forwards instead of 3(p - 1).
    """
    if strategy.schedule == "dualpipev" and strategy.pipeline > 1:
        return 6 * (strategy.pipeline - 1) / (4 * strategy.pipeline - 5)
    return strategy.virtual_stages


def estimate_time(layout: Layout) -> Time:
    """compute, comms, optimizer and bubble are those of the slowest pipeline rank and add up to the step."""
    s = layout.strategy
    m = s.gradient_accumulation_steps
    stages = [_stage_seconds(layout, rank) for rank in range(s.pipeline)]
    slowest = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    worst = stages[slowest]
    bubble = (sum(stage.total for stage in stages) - worst.total) / bubble_divisor(s)
    busy = m * worst.total
    data_comm = max(_data_comm_seconds(layout, rank, stages[rank]) for rank in range(s.pipeline))
    optimizer = max(_optimizer_seconds(layout, rank) for rank in range(s.pipeline))
    step = busy + bubble + data_comm + optimizer
    mean_busy = m * sum(stage.total for stage in stages) / s.pipeline
    precision = layout.recipe.training.precision
    world = s.world_size
    tokens = layout.recipe.training.global_batch_size * layout.recipe.training.sequence_length
    model_flops = FORWARDS_PER_STEP * forward_flops_per_token(layout) * tokens
    hardware_flops = model_flops + _recomputed_flops_per_token(layout) * tokens
    return Time(
        step_seconds=step,
        compute_seconds=m * worst.compute,
        tensor_comm_seconds=m * worst.tensor_comm,
        pipeline_comm_seconds=m * worst.pipeline_comm,
        data_comm_seconds=data_comm,
        optimizer_seconds=optimizer,
        bubble_seconds=bubble,
        bubble_fraction=1 - mean_busy / (busy + bubble),
        tokens_per_second_per_gpu=tokens / step / world,
        model_tflops_per_gpu=model_flops / step / world / 1e12,
        hardware_tflops_per_gpu=hardware_flops / step / world / 1e12,
        mfu=model_flops / step / world / peak_flops(layout, precision),
    )


def peak_flops(layout: Layout, precision: str) -> float:
    """Dense peak of the precision. A GPU without it (a rule reports that) computes in fp32 at best."""
    peaks = layout.cluster.gpu.peak_flops
    return peaks.get(precision) or peaks.get("fp32") or min(peaks.values())


def forward_flops_per_token(layout: Layout) -> int:
    """Matrix products of the whole model, full S x S attention, the head included, the lookup not."""
    totals = layout.totals
    return totals.matmul_flops[-1] + totals.attention_flops[-1] * layout.recipe.training.sequence_length


def _recomputed_flops_per_token(layout: Layout) -> int:
    return sum(
        _recomputed_block_flops(layout, block)[0] + _recomputed_block_flops(layout, block)[1]
        for rank in layout.ranks
        for block in rank
    )


def _recomputed_block_flops(layout: Layout, block: Block) -> tuple[int, int]:
    """(matmul, attention) FLOPs per token run a second time. full: every decoder layer; selective: the attention
    module, its projections included."""
    totals, sequence = layout.totals, layout.recipe.training.sequence_length
    mode = layout.strategy.activation_checkpointing
    decoder = block.of(totals.decoder_layers)
    if mode == "none" or not decoder:
        return 0, 0
    attention = block.of(totals.attention_flops) * sequence
    layer = totals.matmul_flops[2] - totals.matmul_flops[1]
    if mode == "full":
        return decoder * layer, attention
    graph = layout.graph
    width = (graph.attention_heads + graph.key_value_heads) * graph.head_dim  # Q and O, K and V: two matrices each
    # Megatron's "selective" recomputes the products over S x S only (arXiv 2205.05198), not the projections.
    projections = 0 if layout.recipe.target == "megatron" else 2 * 2 * graph.hidden_size * width
    return decoder * projections, attention


def _stage_seconds(layout: Layout, rank: int) -> StageSeconds:
    s, cluster = layout.strategy, layout.cluster
    forward = sum(_forward_seconds(layout, block) for block in layout.ranks[rank])
    recomputed = sum(_recompute_seconds(layout, block) for block in layout.ranks[rank])
    compute = FORWARDS_PER_STEP * forward + recomputed + MICRO_BATCH_OVERHEAD_SECONDS * (not cluster.gpu.is_cpu)
    message = layout.tokens * layout.graph.hidden_size * layout.element_bytes
    tensor_comm = 0.0
    if s.tensor > 1:
        # Two all-reduces forward and two backward per decoder layer (arXiv 1909.08053), and the recomputed ones.
        per_layer = {"full": 6, "selective": 5, "none": 4}[s.activation_checkpointing]
        calls = sum(per_layer * block.of(layout.totals.decoder_layers) for block in layout.ranks[rank])
        calls += layout.has_head(rank) + (layout.ranks[rank][0].start == 0)
        bandwidth = layout.link_bytes_per_second(s.tensor)
        tensor_comm = calls * 2 * (s.tensor - 1) / s.tensor * message / bandwidth
    pipeline_comm = 0.0
    if s.pipeline > 1:
        # An activation and a gradient cross each boundary; the neighbour is data x tensor ranks away.
        crossings = {"dualpipev": 2}.get(s.schedule, s.virtual_stages)
        bandwidth = layout.link_bytes_per_second(s.tensor * s.data + 1)
        pipeline_comm = 2 * crossings * message / (s.tensor if s.sequence_parallel else 1) / bandwidth
    return StageSeconds(compute=compute, backward=2 * forward, tensor_comm=tensor_comm, pipeline_comm=pipeline_comm)


def _forward_seconds(layout: Layout, block: Block) -> float:
    """One micro-batch forward through one block."""
    totals, sequence = layout.totals, layout.recipe.training.sequence_length
    decoder = block.of(totals.decoder_layers)
    head = int(block.stop == len(layout.graph.layers) and block.stop > block.start)
    matmul = block.of(totals.matmul_flops)
    attention = block.of(totals.attention_flops) * sequence
    return _flops_seconds(layout, matmul, attention) + _traffic_seconds(layout, decoder, head)


def _recompute_seconds(layout: Layout, block: Block) -> float:
    matmul, attention = _recomputed_block_flops(layout, block)
    decoder = block.of(layout.totals.decoder_layers)
    mode = layout.strategy.activation_checkpointing
    traffic = 0.0 if mode == "none" else _traffic_seconds(layout, decoder, 0, attention_only=mode == "selective")
    return _flops_seconds(layout, matmul, attention) + traffic


def _flops_seconds(layout: Layout, matmul_per_token: int, attention_per_token: int) -> float:
    """assume.mfu replaces every efficiency below (and the traffic's time): FLOPs / (peak x mfu)."""
    peak = peak_flops(layout, layout.recipe.training.precision)
    per_rank = layout.tokens / layout.strategy.tensor
    if layout.recipe.assume.mfu is not None:
        return (matmul_per_token + attention_per_token) * per_rank / (peak * layout.recipe.assume.mfu)
    graph, tensor = layout.graph, layout.strategy.tensor
    gemm = GEMM_EFFICIENCY * (ODD_WIDTH_EFFICIENCY if (graph.hidden_size / tensor) % 64 else 1)
    attention = ATTENTION_EFFICIENCY[graph.attention] * (ODD_HEAD_EFFICIENCY if graph.head_dim % 8 else 1)
    return per_rank / peak * (matmul_per_token / gemm + attention_per_token / attention)


def _traffic_seconds(layout: Layout, decoder: int, head: int, *, attention_only: bool = False) -> float:
    """Elementwise kernels of one forward pass: kept activations times the passes over them, at memory bandwidth."""
    if layout.recipe.assume.mfu is not None:
        return 0.0
    s, totals, kernels = layout.strategy, layout.totals, layout.recipe.assume.kernels
    elements = totals.layer_elements_attention / s.tensor
    if not attention_only:
        elements += totals.layer_elements_replicated / (s.tensor if s.sequence_parallel else 1)
        elements += totals.layer_elements_other / s.tensor
    moved = elements * ELEMENTWISE_PASSES[kernels]
    if layout.graph.attention == "eager":
        moved += totals.layer_scores * layout.recipe.training.sequence_length / s.tensor * SCORE_PASSES[kernels]
    total_bytes = decoder * moved * layout.element_bytes + head * LOGIT_BYTES * layout.graph.vocabulary_size / s.tensor
    return layout.tokens * total_bytes / layout.cluster.gpu.hbm_bytes_per_second


def _data_comm_seconds(layout: Layout, rank: int, stage: StageSeconds) -> float:
    """Exposed time of the data-parallel collectives of one step.

    ZeRO 0 and 1: gradients once a step, reduced and gathered again, behind the last backward pass where no pipeline
    drains there. ZeRO-2 reduces at every micro-batch. ZeRO-3 gathers the parameters for forward and backward and
    reduces the gradients at every micro-batch, behind the compute (arXiv 1910.02054).
    """
    s = layout.strategy
    if s.data == 1:
        return 0.0
    m = s.gradient_accumulation_steps
    volume = (s.data - 1) / s.data * layout.numel(rank) / layout.link_bytes_per_second(s.tensor * s.data)
    gradient = ELEMENT_BYTES[layout.accumulation_dtype] if s.zero_stage <= 1 else layout.element_bytes
    hidden = OVERLAP * stage.backward if s.pipeline == 1 else 0.0
    if s.zero_stage <= 1:
        return max(0.0, volume * gradient - hidden) + volume * layout.element_bytes
    if s.zero_stage == 2:
        return m * max(0.0, volume * gradient - hidden) + volume * layout.element_bytes
    recomputes = 1 if s.activation_checkpointing == "full" else 0
    passes = 2 * layout.element_bytes + gradient
    return m * max(0.0, volume * passes - OVERLAP * (1.5 + 0.5 * recomputes) * stage.backward)


def _optimizer_seconds(layout: Layout, rank: int) -> float:
    updated = layout.numel(rank) / (layout.strategy.data if layout.strategy.zero_stage >= 1 else 1)
    return ADAM_BYTES_PER_PARAMETER * updated / layout.cluster.gpu.hbm_bytes_per_second
