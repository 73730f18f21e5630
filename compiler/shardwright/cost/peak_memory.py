"""Peak memory per pipeline rank. First-order.

States: ZeRO (arXiv 1910.02054) - parameters, gradients and Adam's float32 master and moments, cut
by the data (times context) degree d from stage 1 (optimizer), 2 (gradients), 3 (parameters).
Activations: arXiv 2205.05198.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.communication_bytes import (
    dispatch_buffer_bytes,
    imbalance_bytes,
    unsharded_weights,
)
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.layer_shapes import ActivationBytes, SavedActivations, runs_hf_modules
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.cost.task_costs import contrastive_loss_bytes
from shardwright.layout.formats import element_bytes
from shardwright.layout.layout_estimate import Memory, StageMemory
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.planning_problem import Problem
from shardwright.layout.zero_settings import BUCKET_NUMEL, LIVE_NUMEL
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import Recipe

Floats = NDArray[np.float64]

# Links of a GPU, one direction, over which NCCL lays all the channels that it ever does: an A100's.
ALL_CHANNELS_BYTES_PER_SECOND = 300e9


def estimate_memory(layout: PricedLayout, ranks: RankMemoryModel | None = None) -> Memory:
    """Return bytes as nvidia-smi would show them, per pipeline rank; `fits` honours
    memory_headroom. ranks: of this layout, wherever its layers are, where it is known."""
    usable = usable_bytes(layout.problem, layout.constants)
    ranks = ranks or RankMemoryModel(layout)
    stages = tuple(ranks.of(rank, blocks, usable) for rank, blocks in enumerate(layout.ranks))
    peak = max(stage.peak_bytes for stage in stages)
    return Memory(
        peak_bytes=peak,
        capacity_bytes=layout.cluster.capacity_bytes,
        fits=peak <= usable,
        stages=stages,
    )


def memory_is_accepted(recipe: Recipe, memory: Memory) -> bool:
    """Whether memory is no reason to refuse the layout: it fits, or the recipe says to ignore
    that."""
    return memory.fits or recipe.assume.ignore_memory


def usable_bytes(problem: Problem, constants: Constants) -> int:
    """What the driver and a pinned memory_headroom leave of a device."""
    driver = 0.0 if problem.cluster.gpu.is_cpu else constants.driver_share
    headroom = problem.recipe.parallelism.memory_headroom or 0.0
    return int(problem.cluster.capacity_bytes * (1 - max(driver, headroom)))


def bytes_with_headroom(capacity_bytes: int) -> int:
    """Of a device, as much as leaves free what predictions may fall short by."""
    return int(capacity_bytes * (1 - default_constants().memory_headroom))


def model_state_bytes(
    layout: PricedLayout, held: float, trained: float | None = None, experts: float = 0.0
) -> tuple[float, float, float]:
    """Parameters, gradients and optimizer states of a rank that holds so many parameters. trained:
    of them, or of LoRA's adapters, which stand beside them; None: all are trained. experts: those
    of them that expert ranks share out before ZeRO does: what it shares out over all ranks is as
    much with them."""
    s, element = layout.strategy, layout.element_bytes
    numel = held if trained is None else trained
    if trained is not None and layout.adapter_sizes:
        held += trained
    elsewhere = experts * (1 - 1 / s.expert_shard_ratio)
    parameters = (
        held * element / s.zero_world_size if s.zero_stage >= 3 else (held - elsewhere) * element
    )
    if s.hpz_partition_size > 1:
        # The second copy, in the type of the weights (DeepSpeed partition_parameters.py,
        # _partition_param_sec).
        parameters += held * element / s.hpz_partition_size
    gradients = _gradient_bytes(layout) * (
        numel / s.zero_world_size if s.zero_stage >= 2 else numel - elsewhere
    )
    training = layout.recipe.training
    states = OPTIMIZERS[training.optimizer.name].held_bytes(training.precision, s.zero_stage)
    optimizer = numel * states / (s.shards if s.zero_stage >= 1 else 1)
    if s.offload != "none":
        optimizer = 0.0  # in host memory (arXiv 2101.06840), as are the accumulated gradients
        gradients = (numel - elsewhere) * element if s.zero_stage == 1 else 0.0
    if s.offload == "parameters":
        parameters = 0.0
    return parameters, gradients, optimizer


def states_of_layers(layout: PricedLayout) -> Floats:
    """Bytes for good, prefix sums over the decoder layers, all of whose parameters are trained."""
    numel, experts = (
        np.array(each[1:-1], dtype=np.float64)
        for each in (layout.shapes.numel, layout.shapes.expert_numel)
    )
    each, expert = (sum(model_state_bytes(layout, *args)) for args in ((1.0,), (0.0, None, 1.0)))
    found: Floats = each * (numel - numel[0])
    return found + expert * (experts - experts[0]) if layout.strategy.shards_experts else found


def kept_of_layers(layout: PricedLayout) -> Floats:
    """Bytes of one micro-batch, prefix sums over the decoder layers, all of which are checkpointed
    alike."""
    sums = np.array(_kept_sums(layout, layout.activations, layout.strategy.checkpointing)[1:-1])
    kept: Floats = sums - sums[0]
    return kept


def least_rank_bytes(layout: PricedLayout) -> tuple[float, float]:
    """Of any pipeline rank without layers, and what the head adds to its rank."""
    plain, with_head = (_working_bytes(layout, head, True) for head in (False, True))
    return framework_bytes(layout) + plain, with_head - plain


def logits_are_peak(layout: PricedLayout, ranks: RankMemoryModel) -> bool:
    """Return whether the loss is the largest working set of the peak-memory rank, which chunks of
    it can lower. ranks: of this layout."""
    peak_rank_blocks = max(layout.ranks, key=lambda blocks: ranks.peak_bytes(blocks, 0))
    return layout.has_head(peak_rank_blocks) and ranks.loss_is_largest(peak_rank_blocks)


class RankMemoryModel:
    """What a pipeline rank holds, by the blocks on it. What no partition changes is worked out once
    a layout: a partition is found by asking about thousands of blocks."""

    def __init__(self, layout: PricedLayout) -> None:
        self._layout = layout
        self._framework = framework_bytes(layout)
        checkpointing = (
            layout.strategy.checkpointing if layout.checkpointed_activations is None else "none"
        )
        self._kept = _kept_sums(layout, layout.activations, checkpointing)
        self._again = (
            self._kept
            if layout.checkpointed_activations is None
            else _kept_sums(layout, layout.checkpointed_activations, "full")
        )
        self._boundary = _boundary_bytes(layout)
        self._gathers = layout.strategy.zero_stage >= 3 and layout.strategy.zero_world_size > 1
        self._frozen, self._fragmentation = layout.has_frozen, layout.constants.fragmentation
        self._working = {
            (head, again): _working_bytes(layout, head, again)
            for head in (False, True)
            for again in ((True,) if layout.checkpointed_activations is None else (False, True))
        }

    def of(self, rank: int, blocks: tuple[ModelChunk, ...], usable: int) -> StageMemory:
        """usable: bytes that the allocator may fill with freed blocks."""
        parameters, gradients, optimizer, kept, workspace = self._parts(blocks, usable)
        return StageMemory(
            stage=rank,
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            activations_bytes=kept,
            workspace_bytes=workspace,
            peak_bytes=parameters + gradients + optimizer + kept + workspace,
        )

    def peak_bytes(self, blocks: tuple[ModelChunk, ...], usable: int) -> int:
        return sum(self._parts(blocks, usable))

    def loss_is_largest(self, blocks: tuple[ModelChunk, ...]) -> bool:
        """Of a rank with the head."""
        again = _is_recomputed_at_peak(self._layout, blocks)
        return self._working[True, again] > self._working[False, again] + _retained_output_bytes(
            self._layout
        )

    def _parts(self, blocks: tuple[ModelChunk, ...], usable: int) -> tuple[int, int, int, int, int]:
        """Parameters, gradients, optimizer states, activations, workspace."""
        layout = self._layout
        held = layout.numel_of_chunks(blocks)
        numel = layout.trainable_numel_of(blocks) if self._frozen else held
        states = model_state_bytes(
            layout, held, numel if self._frozen else None, layout.expert_numel_of(blocks)
        )
        activations = sum(
            [(self.kept_bytes(b.start, b.stop) + self._boundary) * b.in_flight for b in blocks]
        )
        bucket = _bucket_bytes(layout, numel)
        # Two phases that never meet: the last backward pass, and the optimizer's step, when no
        # activation is left.
        backward = (
            activations
            + self._working[layout.has_head(blocks), _is_recomputed_at_peak(layout, blocks)]
        )
        backward += _unsharded_weight_bytes(layout, blocks) if self._gathers else 0.0
        if layout.strategy.pipeline == 1:
            backward += bucket
        step = bucket + _copied_bytes(layout, numel)
        parameters, gradients, optimizer = round(states[0]), round(states[1]), round(states[2])
        kept, workspace = (
            round(activations),
            round(max(backward, step) - activations + self._framework),
        )
        live = parameters + gradients + optimizer + kept + workspace
        # The allocator keeps freed blocks for later, those of the other phase too (a step's buffers
        # are too large for the holes that activations leave), and gives them back when the device
        # is nearly full.
        slack = round(self._fragmentation * live + min(backward, step))
        return parameters, gradients, optimizer, kept, workspace + max(0, min(slack, usable - live))

    def kept_bytes(self, start: int, stop: int) -> float:
        """Of one micro-batch, by these layers of a stage."""
        if self._again is self._kept:
            return self._kept[stop] - self._kept[start]
        until = self._layout.checkpointed_stop(start, stop)
        return self._again[until] - self._again[start] + self._kept[stop] - self._kept[until]


def framework_bytes(layout: PricedLayout) -> float:
    """Context and communicators: the world's, and those of each way of being parallel (a pipeline
    has one a side).

    NCCL lays a channel or two over each link of a GPU, so its buffers grow with the links' number
    (NCCL's topology search; 24 channels on an A100's 12 links of 25 GB/s, 12 on a V100's 6, no more
    on newer GPUs).
    """
    s, c = layout.strategy, layout.constants
    if layout.cluster.gpu.is_cpu:
        return c.cpu_framework_bytes
    groups = (
        (s.world_size > 1)
        + (s.zero_world_size > 1)
        + (s.context > 1)
        + (s.tensor > 1)
        + 2 * (s.pipeline > 1)
    )
    groups += (s.hpz_partition_size > 1) + (s.expert > 1) + (1 < s.expert < s.zero_world_size)
    channels = min(1.0, layout.cluster.intra_node_bytes_per_second / ALL_CHANNELS_BYTES_PER_SECOND)
    return c.context_bytes + groups * channels * c.communicator_bytes


def _gradient_bytes(layout: PricedLayout) -> int:
    """Per parameter: the gradient itself, and the float32 buffer beside it where half precision
    accumulates in fp32 (BF16_Optimizer at stage 1; stages 2 and 3 accumulate in the partition
    alone)."""
    accumulation = element_bytes(layout.accumulation_dtype)
    if layout.traits.fuses_accumulation or layout.traits.frees_gradients_after_add:
        # products add to the accumulated gradient itself (Megatron-LM's main_grad), or hooks do
        return accumulation
    if accumulation == layout.element_bytes or layout.strategy.zero_stage >= 2:
        return accumulation
    return layout.element_bytes + accumulation


def _kept_sums(
    layout: PricedLayout, found: SavedActivations, checkpointing: Checkpointing
) -> list[float]:
    """What one micro-batch keeps for its backward pass on one rank, prefix sums over
    graph.layers."""
    s, degree = layout.strategy, layout.shapes.attention_degree
    replicated, sharded = (
        np.array(found.replicated, dtype=np.float64),
        np.array(found.sharded, dtype=np.float64),
    )
    # A context rank has its piece of each row and, in attention, its heads of the whole one: the
    # same share of both.
    rows = s.micro_batch_size / s.context
    sums = (replicated / (degree if s.sequence_parallel else 1) + sharded / degree) * rows
    if s.expert > 1 and checkpointing != "full":  # rows of other ranks' tokens
        of_kind = [
            *(imbalance_bytes(layout, kind) for kind in layout.shapes.kinds),
            0.0,
        ]  # -1: the ends
        sums[1:] += np.cumsum(np.array(of_kind)[list(layout.shapes.kind_of)])
    result: list[float] = sums.tolist()
    return result


def _boundary_bytes(layout: PricedLayout) -> float:
    """Of a micro-batch: a stage's output, held until the gradient comes back. DeepSpeed's
    pipe_partitioned keeps a share a tensor rank."""
    s = layout.strategy
    if s.pipeline == 1:
        return 0.0
    return (
        layout.graph.hidden_size
        / s.message_shards
        * layout.tokens
        * layout.element_bytes
        / s.virtual_stages
    )


def _is_recomputed_at_peak(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> bool:
    """Whether a layer is recomputed beside all that is kept. Not under partial checkpointing where
    a stage keeps some layers: they go backward before those that it recomputes, and leave their
    room."""
    if layout.checkpointed_activations is None:
        return True
    ends = ((block, layout.checkpointed_stop(block.start, block.stop)) for block in blocks)
    return any(
        until - block.start - (block.start == 0) == layout.decoder_layers(block) > 0
        for block, until in ends
    )


def _working_bytes(layout: PricedLayout, with_head: bool, again: bool) -> float:
    """Short-lived: the layer in its backward pass, or the loss over the vocabulary, whichever is
    more (they never meet), beside masks. What a rank's number of parameters decides is not in it.
    again: see _is_recomputed_at_peak."""
    s, c, found = layout.strategy, layout.constants, layout.activations

    def made(share: ActivationBytes) -> float:
        return s.micro_batch_size * share.on_rank(
            layout.shapes.attention_degree, sequence_parallel=s.sequence_parallel
        )

    def held(share: ActivationBytes) -> float:
        return made(share) / s.context

    recomputed = (layout.checkpointed_activations or found).recomputed
    layer = again * held(recomputed) + c.backward_share * held(found.largest)
    # Once as what is made again and once as its gradient.
    exchanged = (
        2 * imbalance_bytes(layout, kind) + dispatch_buffer_bytes(layout, kind)
        for kind in layout.shapes.kinds
    )
    layer += max(exchanged, default=0.0)
    loss = 0.0
    if with_head and layout.graph.task_traits.compares_pairs:
        loss = contrastive_loss_bytes(layout) + held(found.head)
    elif with_head:
        kernels = layout.recipe.assume.kernels
        logits = (
            c.logit_bytes("auto" if runs_hf_modules(layout.graph, kernels) else kernels)
            * layout.shapes.head_width
        )
        kept = _retained_output_bytes(layout)
        layer += kept
        loss = (
            layout.logit_tokens * logits + held(found.head) + max(0.0, kept - _output_bytes(layout))
        )
        if s.loss == "chunked" and not layout.language_model_is_frozen:
            # The chunks' gradients of the head's weight are summed before they reach the parameter.
            loss += layout.shapes.head_width * layout.graph.hidden_size * layout.element_bytes
    return max(layer, loss) + made(found.context)  # masks are of the whole row on each rank


def _unsharded_weight_bytes(layout: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """ZeRO-3's gathered weights: the layer in use and the one fetched ahead, as far as DeepSpeed
    lets them live together, or those that stay whole from the forward to the backward pass."""
    s = layout.strategy
    layers, widest = (
        2 * layout.shapes.largest_layer(s.expert),
        layout.shapes.largest_product(s.expert),
    )
    kept = (
        0.0 if layout.traits.zero3_gathers_flat_layers else unsharded_weights(layout, blocks).kept
    )
    return max(min(layers, LIVE_NUMEL + widest), kept) * layout.element_bytes


def _output_bytes(layout: PricedLayout) -> float:
    """What one micro-batch gives the loss: logits, or the hidden states that chunks of them are
    made of."""
    width = (
        layout.graph.hidden_size if layout.strategy.loss == "chunked" else layout.shapes.head_width
    )
    return layout.tokens * width * layout.element_bytes


def _retained_output_bytes(layout: PricedLayout) -> float:
    """Under 1F1B DeepSpeed's last stage does not clear a micro-batch's output after its backward
    pass, and has two buffers for them (pipe/engine.py, _exec_backward_pass; pipe/schedule.py,
    TrainSchedule.num_pipe_buffers)."""
    s = layout.strategy
    if s.pipeline == 1 or not s.pipeline_schedule.retains_outputs:
        return 0.0
    return min(layout.traits.saved_stage_outputs, s.gradient_accumulation_steps) * _output_bytes(
        layout
    )


def _bucket_bytes(layout: PricedLayout, numel: int) -> float:
    """ZeRO's communication bucket, in the backward pass and in the step. A pipeline makes it when
    the last backward pass is done (DeepSpeed stage_1_and_2.py, reduce_gradients)."""
    s = layout.strategy
    if s.zero_stage == 0 or s.zero_world_size == 1:
        return 0.0
    return min(BUCKET_NUMEL, numel) * layout.element_bytes


def _copied_bytes(layout: PricedLayout, numel: int) -> float:
    """A float32 copy, in the optimizer's step, of a rank's share of the gradients where they are
    accumulated in less (DeepSpeed stage_1_and_2.py, step)."""
    s = layout.strategy
    copied = (
        element_bytes(layout.accumulation_dtype) < 4
        and 1 <= s.zero_stage <= 2
        and s.offload == "none"
    )
    return 4 * numel / s.zero_world_size if copied else 0.0
