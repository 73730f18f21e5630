"""Time of one optimizer step.

Compute: each layer's kernels (compute.py). Collectives: rings (collectives.py). Pipeline: makespan = (m - 1) x slowest
+ one micro-batch through every stage, which is (m + p - 1) x stage where stages are even (arXiv 2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.activations import keeps_products
from shardwright.cost.collectives import all_reduce_seconds, gather_seconds, group_of, ring_start_seconds, send_seconds
from shardwright.cost.compute import ELEMENT_BYTES, LayerSeconds, layer_seconds, peak_flops, stops_early
from shardwright.cost.layout import Layout
from shardwright.cost.offload import host_step_seconds, host_transfer_seconds
from shardwright.cost.shapes import dropped_products, model_shapes
from shardwright.ir.estimate import Time
from shardwright.ir.strategy import Strategy

# Forward + backward FLOPs, in forwards; recomputation adds its share on top.
FORWARDS_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One micro-batch, forward and backward, on one pipeline rank."""

    compute: float
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
    per_layer = layer_seconds(layout.recipe, layout.graph, layout.cluster.gpu, s, layout.constants)
    stages = [_stage_seconds(layout, rank, per_layer) for rank in range(s.pipeline)]
    slowest = max(range(s.pipeline), key=lambda rank: stages[rank].total)
    worst = stages[slowest]
    bubble = (sum(stage.total for stage in stages) - worst.total) / bubble_divisor(s)
    busy = m * worst.total
    data_comm = max(_data_comm_seconds(layout, rank, stages[rank]) for rank in range(s.pipeline))
    if s.offload != "none":  # another link, at the same time
        data_comm = max(data_comm, host_transfer_seconds(layout, slowest, worst.compute))
    optimizer = max(_optimizer_seconds(layout, rank) for rank in range(s.pipeline))
    step = busy + bubble + data_comm + optimizer
    mean_busy = m * sum(stage.total for stage in stages) / s.pipeline
    world = s.world_size
    tokens = layout.recipe.training.global_batch_size * layout.recipe.training.sequence_length
    model_flops = FORWARDS_PER_STEP * forward_flops_per_token(layout) * tokens
    hardware_flops = model_flops + recomputed_flops_per_token(layout) * tokens
    peak = peak_flops(layout.cluster.gpu, layout.recipe.training.precision)
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
        mfu=model_flops / step / world / peak,
    )


def forward_flops_per_token(layout: Layout) -> int:
    """Matrix products of the whole model, full S x S attention, the head included, the lookup not."""
    products, _, scores = layout.shapes.decoder_flops
    return products + scores * layout.recipe.training.sequence_length + layout.shapes.head_flops


def recomputed_flops_per_token(layout: Layout) -> int:
    """full: every decoder layer; selective: the scores and the attention module's projections, Megatron's the scores
    alone, torch's by operator every second product (see keeps_products).

    As they are counted: what a checkpoint leaves out of a repeated layer because nobody reads it is in the time alone.
    """
    products, projections, scores = layout.shapes.decoder_flops
    scores *= layout.recipe.training.sequence_length
    match layout.strategy.activation_checkpointing:
        case "full":
            return products + scores
        case "selective" if layout.is_megatron:
            return scores
        case "selective" if keeps_products(layout.graph, layout.recipe.assume.kernels):
            whole = model_shapes(layout.graph, 1)
            dropped = [2 * sum(p.n * p.k for p in dropped_products(kind.products)) for kind in whole.kinds]
            again = sum(dropped[kind] for kind in whole.kind_of if kind >= 0)
            return again + (scores if layout.graph.attention == "eager" else 0)
        case "selective":
            return projections + scores
        case _:
            return 0


def _stage_seconds(layout: Layout, rank: int, per_layer: LayerSeconds) -> StageSeconds:
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    blocks = layout.ranks[rank]
    compute = 0.0
    for part in (per_layer.forward, per_layer.backward, per_layer.again):
        compute += sum(part[block.stop] - part[block.start] for block in blocks)
    if layout.recipe.assume.mfu is None:
        compute += _accumulation_seconds(layout, rank)
        compute += 0.0 if cluster.gpu.is_cpu else c.micro_batch_seconds
    message = layout.tokens * layout.graph.hidden_size * layout.element_bytes
    tensor_comm = _tensor_comm_seconds(layout, rank) if s.tensor > 1 else 0.0
    pipeline_comm = 0.0
    if s.pipeline > 1:
        # An activation and a gradient cross each boundary; the neighbour is data x tensor ranks away. DeepSpeed
        # (pipe_partitioned) and Megatron (scatter-gather, arXiv 2104.04473) send a share from each tensor rank and
        # gather it there; DualPipeV sends the whole.
        crossings = {"dualpipev": 2}.get(s.schedule, s.virtual_stages)
        share = 1 if s.schedule == "dualpipev" else s.tensor
        each = send_seconds(cluster, c, s.tensor * s.data, message / share)
        if share > 1 and not s.sequence_parallel:
            each += gather_seconds(cluster, c, group_of(cluster, s.tensor, 1), message)
        pipeline_comm = 2 * crossings * each
    return StageSeconds(compute=compute, tensor_comm=tensor_comm, pipeline_comm=pipeline_comm)


def _tensor_comm_seconds(layout: Layout, rank: int) -> float:
    """Per decoder layer, forward and backward: an all-reduce for each half whose features are cut (arXiv 1909.08053),
    those that recomputation repeats (the attention module has one, Megatron's "selective" none), and the gathers of
    the linears whose output is whole."""
    s, c, cluster, shapes = layout.strategy, layout.constants, layout.cluster, layout.shapes
    blocks, group = layout.ranks[rank], group_of(cluster, s.tensor, 1)
    message = layout.tokens * layout.element_bytes
    attention, feed_forward = shapes.attention_degree > 1, shapes.feed_forward_degree > 1
    again_attention, again_feed_forward = {"none": (0, 0), "selective": (1, 0), "full": (1, 1)}[
        s.activation_checkpointing
    ]
    if s.activation_checkpointing == "selective" and layout.is_megatron:
        again_attention = 0
    elif stops_early(layout.graph, layout.recipe.assume.kernels):  # the last product's reduction is left out with it
        again_attention, again_feed_forward = {"none": (0, 0), "selective": (0, 0), "full": (1, 0)}[
            s.activation_checkpointing
        ]
    per_decoder = (2 + again_attention) * attention + (2 + again_feed_forward) * feed_forward
    reduces = sum(per_decoder * layout.decoder_layers(block) for block in blocks)
    reduces += layout.has_head(rank) + (blocks[0].start == 0)
    gathers = 2 * sum(shapes.gathered_products[b.stop] - shapes.gathered_products[b.start] for b in blocks)
    gathered = sum(shapes.gathered_features[b.stop] - shapes.gathered_features[b.start] for b in blocks) * message
    host = 0.0 if layout.is_megatron or cluster.gpu.is_cpu else c.collective_host_seconds
    seconds = reduces * all_reduce_seconds(cluster, c, group, message * layout.graph.hidden_size)
    return seconds + gather_seconds(cluster, c, group, gathered, gathers) + (reduces + gathers) * host


def _accumulation_seconds(layout: Layout, rank: int) -> float:
    """Each micro-batch's gradient is read and added to the accumulated one, in its own type.

    Megatron's product adds it itself (gradient_accumulation_fusion)."""
    if layout.is_megatron:
        return 0.0
    moved = layout.element_bytes + 2 * ELEMENT_BYTES[layout.accumulation_dtype]
    return _traffic_seconds(layout, moved * layout.numel(rank))


def _data_comm_seconds(layout: Layout, rank: int, stage: StageSeconds) -> float:
    """Exposed time of the data-parallel collectives of one step.

    ZeRO 0 and 1: gradients once a step, reduced and gathered again, behind the last backward pass where no pipeline
    drains there. ZeRO-2 reduces at every micro-batch. ZeRO-3 gathers each layer's parameters for forward and backward
    and reduces its gradients at every micro-batch, behind the compute (arXiv 1910.02054).
    """
    s, c, cluster = layout.strategy, layout.constants, layout.cluster
    tied = _tied_seconds(layout)
    if s.data == 1:
        return tied
    m, numel, element = s.gradient_accumulation_steps, layout.numel(rank), layout.element_bytes
    group = group_of(cluster, s.data, s.tensor)
    gradient = ELEMENT_BYTES[layout.accumulation_dtype] if s.zero_stage <= 1 else element
    buckets = max(1.0, numel / c.bucket_elements)

    def exposed(comm: float, share: float) -> float:
        """Hidden behind this share of a micro-batch's compute."""
        return comm - c.overlap * min(comm, share * stage.compute)

    reduce = gather_seconds(cluster, c, group, numel * gradient, buckets)
    gather = gather_seconds(cluster, c, group, numel * element, buckets)
    backward_share = FORWARDS_PER_STEP - 1
    behind = backward_share / FORWARDS_PER_STEP if s.pipeline == 1 else 0.0
    if s.zero_stage == 0:
        return tied + exposed(2 * reduce, behind)
    if not layout.is_megatron and not cluster.gpu.is_cpu and s.zero_stage <= 2:
        reduce, gather = reduce / c.zero_reduction_efficiency, gather / c.zero_reduction_efficiency
    if s.zero_stage == 1:
        return tied + exposed(reduce, behind) + gather
    if s.zero_stage == 2:
        return tied + m * exposed(reduce, behind) + gather
    layers = sum(block.stop - block.start for block in layout.ranks[rank])
    passes = 2 * gather_seconds(cluster, c, group, numel * element, 0)
    passes += gather_seconds(cluster, c, group, numel * gradient, 0)
    # The ring's steps do not hide: at each of them the ranks wait for one another.
    return tied + m * (exposed(passes, 1.0) + 3 * layers * ring_start_seconds(c, group))


def _tied_seconds(layout: Layout) -> float:
    """The first and the last stage add up the gradients of a tensor that both hold."""
    s = layout.strategy
    if s.pipeline == 1 or s.schedule == "dualpipev" or not layout.shapes.shared_numel:
        return 0.0
    size = layout.shapes.shared_numel * ELEMENT_BYTES[layout.accumulation_dtype]
    distance = s.tensor * s.data * (s.pipeline - 1)
    return send_seconds(layout.cluster, layout.constants, distance, size)


def _optimizer_seconds(layout: Layout, rank: int) -> float:
    if layout.strategy.offload != "none":
        return host_step_seconds(layout, rank)
    updated = layout.numel(rank) / (layout.strategy.data if layout.strategy.zero_stage >= 1 else 1)
    return _traffic_seconds(layout, layout.constants.optimizer_traffic_bytes * updated)


def _traffic_seconds(layout: Layout, moved_bytes: float) -> float:
    return moved_bytes / (layout.cluster.gpu.hbm_bytes_per_second * layout.constants.memory_efficiency)
