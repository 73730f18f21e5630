"""Estimate the peak memory of each pipeline rank, to first order.

States: ZeRO (arXiv 1910.02054) shards Adam's float32 master and moments from stage 1, gradients
from 2 and parameters from 3 over the data (times context) degree d. Activations: arXiv 2205.05198.
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
from shardwright.cost.layer_shapes import ActivationBytes, SavedActivations
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.cost.task_costs import contrastive_loss_bytes
from shardwright.layout.formats import MASTER_BYTES, element_bytes
from shardwright.layout.layout_estimate import Memory, StageMemory
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.planning_problem import Problem
from shardwright.layout.quantized_moments import BLOCK, CHUNK_BLOCKS
from shardwright.layout.zero_settings import BUCKET_NUMEL, LIVE_NUMEL, MUON_BUCKET_NUMEL
from shardwright.recipe.recipe_types import Recipe

Floats = NDArray[np.float64]

# Link rate of an A100, one direction, at which NCCL uses its maximum number of channels.
ALL_CHANNELS_BYTES_PER_SECOND = 300e9


def estimate_memory(priced: PricedLayout, ranks: RankMemoryModel | None = None) -> Memory:
    """Return bytes as nvidia-smi would show them, per pipeline rank; `fits` honours
    memory_headroom. ranks: of this layout, wherever its layers are, where it is known."""
    usable = usable_bytes(priced.problem, priced.constants)
    ranks = ranks or RankMemoryModel(priced)
    stages = tuple(ranks.of(rank, blocks, usable) for rank, blocks in enumerate(priced.ranks))
    peak = max(stage.peak_bytes for stage in stages)
    return Memory(
        peak_bytes=peak,
        capacity_bytes=priced.cluster.capacity_bytes,
        fits=peak <= usable,
        stages=stages,
    )


def memory_is_accepted(recipe: Recipe, memory: Memory) -> bool:
    """Return whether the layout fits, or the recipe ignores memory."""
    return memory.fits or recipe.assume.ignore_memory


def usable_bytes(problem: Problem, constants: Constants) -> int:
    """Return the bytes of a device beside the driver's and a pinned memory_headroom."""
    gpu, capacity = problem.cluster.gpu, problem.cluster.capacity_bytes
    driver = constants.driver_share if gpu.kind.has_driver else 0.0
    headroom = problem.recipe.parallelism.memory_headroom or 0.0
    usable = int(capacity * (1 - max(driver, headroom)))
    if gpu.visible_memory_gib is None:
        return usable
    return min(usable, int(gpu.visible_memory_gib * 2**30 * (1 - driver)))


def bytes_with_headroom(capacity_bytes: int) -> int:
    """Return the bytes of a device less the headroom for prediction errors."""
    return int(capacity_bytes * (1 - default_constants().memory_headroom))


def model_state_bytes(
    priced: PricedLayout,
    held: float,
    trained: float | None = None,
    experts: float = 0.0,
    matrices: float = 0.0,
    factors: float = 0.0,
) -> tuple[float, float, float]:
    """Return (parameter, gradient, optimizer) bytes of a rank.

    held: parameters on the rank
    trained: those of them that are trained, or LoRA's adapters beside them; None: all
    experts: those of them that expert ranks shard before ZeRO does; ZeRO's shards over all ranks
        have the same size with them
    matrices: those of the trained ones that have other optimizer states
    factors: elements of factored moments, which ZeRO does not shard
    """
    s, element = priced.strategy, priced.element_bytes
    numel = held if trained is None else trained
    if trained is not None and priced.adapter_sizes:
        held += trained
    elsewhere = experts * (1 - 1 / s.expert_shard_ratio)
    parameters = (
        held * element / s.zero_world_size if s.zero_stage >= 3 else (held - elsewhere) * element
    )
    if s.hpz_partition_size > 1:
        # hpZ's second copy, in the weights' dtype (DeepSpeed partition_parameters.py,
        # _partition_param_sec).
        parameters += held * element / s.hpz_partition_size
    gradients = _gradient_bytes(priced) * (
        numel / s.zero_world_size if s.zero_stage >= 2 else numel - elsewhere
    )
    training = priced.recipe.training
    row = OPTIMIZERS[training.optimizer.name]
    if s.zero_stage == 0:
        numel, matrices = numel - elsewhere, matrices - (elsewhere if matrices else 0.0)
    states = numel * row.held_bytes(training.precision, s.zero_stage)
    states -= matrices * row.matrix_saving_bytes
    optimizer = states / (s.zero_world_size if s.zero_stage >= 1 else 1)
    optimizer += factors * row.moment_bytes
    if s.offload != "none":
        optimizer = 0.0  # in host memory (arXiv 2101.06840), as are the accumulated gradients
        if not priced.traits.overlaps_host_update:
            gradients = (numel - elsewhere) * element if s.zero_stage == 1 else 0.0
    if s.offload == "parameters":
        parameters = 0.0
    return parameters, gradients, optimizer


def states_of_layers(priced: PricedLayout) -> Floats:
    """Return model state bytes, prefix sums over the decoder layers, all of them trained."""
    numel, experts = (
        np.array(each[1:-1], dtype=np.float64)
        for each in (priced.shapes.numel, priced.shapes.expert_numel)
    )
    each, expert = (sum(model_state_bytes(priced, *args)) for args in ((1.0,), (0.0, None, 1.0)))
    found: Floats = each * (numel - numel[0])
    if priced.matrices:
        own = np.array(priced.matrices[1:-1], dtype=np.float64)
        found = found + sum(model_state_bytes(priced, 0.0, matrices=1.0)) * (own - own[0])
    if priced.factors:
        own = np.array(priced.factors[1:-1], dtype=np.float64)
        found = found + sum(model_state_bytes(priced, 0.0, factors=1.0)) * (own - own[0])
    return found + expert * (experts - experts[0]) if priced.strategy.shards_experts else found


def kept_of_layers(priced: PricedLayout) -> Floats:
    """Return saved activation bytes of one micro-batch, prefix sums over equally checkpointed
    decoder layers."""
    saves_experts = not priced.strategy.recomputes_experts
    sums: Floats = np.array(
        _saved_sums(priced, priced.activations, saves_experts=saves_experts)[1:-1]
    )
    saved: Floats = sums - sums[0]
    return saved


def least_rank_bytes(priced: PricedLayout) -> tuple[float, float]:
    """Return the bytes of any pipeline rank without layers, and what the head adds."""
    without_head, with_head = (_working_bytes(priced, head, True) for head in (False, True))
    return framework_bytes(priced) + without_head, with_head - without_head


def logits_are_peak(priced: PricedLayout, ranks: RankMemoryModel) -> bool:
    """Return whether the loss is the largest working set of the peak-memory rank, which chunks of
    it can lower. ranks: of this layout."""
    peak_rank_blocks = max(priced.ranks, key=lambda blocks: ranks.peak_bytes(blocks, 0))
    return priced.has_head(peak_rank_blocks) and ranks.loss_is_largest(peak_rank_blocks)


class RankMemoryModel:
    """Compute a pipeline rank's memory from its chunks.

    A search asks about thousands of chunks, so what they do not change is computed once a layout.
    """

    def __init__(self, priced: PricedLayout) -> None:
        self._priced = priced
        self._framework = framework_bytes(priced)
        is_partial = priced.checkpointed_activations is not None
        saves_experts = is_partial or not priced.strategy.recomputes_experts
        self._saved = _saved_sums(priced, priced.activations, saves_experts=saves_experts)
        self._checkpointed = (
            self._saved
            if priced.checkpointed_activations is None
            else _saved_sums(priced, priced.checkpointed_activations, saves_experts=False)
        )
        self._boundary = _boundary_bytes(priced)
        self._gathers = priced.strategy.zero_stage >= 3 and priced.strategy.zero_world_size > 1
        self._frozen, self._fragmentation = priced.has_frozen, priced.constants.fragmentation
        self._working = {
            (head, recomputes): _working_bytes(priced, head, recomputes)
            for head in (False, True)
            for recomputes in (
                (True,) if priced.checkpointed_activations is None else (False, True)
            )
        }

    def of(self, rank: int, blocks: tuple[ModelChunk, ...], usable: int) -> StageMemory:
        """Return the memory of a rank; usable: bytes that the allocator may fill with freed
        blocks."""
        parameters, gradients, optimizer, saved, workspace = self._parts(blocks, usable)
        return StageMemory(
            stage=rank,
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            activations_bytes=saved,
            workspace_bytes=workspace,
            peak_bytes=parameters + gradients + optimizer + saved + workspace,
        )

    def peak_bytes(self, blocks: tuple[ModelChunk, ...], usable: int) -> int:
        return sum(self._parts(blocks, usable))

    def loss_is_largest(self, blocks: tuple[ModelChunk, ...]) -> bool:
        """Return whether the loss is the largest working set of a rank with the head."""
        recomputes = _is_recomputed_at_peak(self._priced, blocks)
        layer = self._working[False, recomputes] + _retained_output_bytes(self._priced)
        return self._working[True, recomputes] > layer

    def _parts(self, blocks: tuple[ModelChunk, ...], usable: int) -> tuple[int, int, int, int, int]:
        """Return bytes of parameters, gradients, optimizer states, activations and workspace."""
        priced = self._priced
        held = priced.numel_of_chunks(blocks)
        numel = priced.trainable_numel_of(blocks) if self._frozen else held
        states = model_state_bytes(
            priced,
            held,
            numel if self._frozen else None,
            priced.expert_numel_of(blocks),
            priced.matrix_numel_of(blocks),
            priced.factor_numel_of(blocks),
        )
        activations = sum(
            [
                (self.saved_activation_bytes(b.start, b.stop) + self._boundary) * b.in_flight
                for b in blocks
            ]
        )
        bucket = _bucket_bytes(priced, numel)
        # The last backward pass and the optimizer's step, which has no activations, never overlap.
        backward = (
            activations
            + self._working[priced.has_head(blocks), _is_recomputed_at_peak(priced, blocks)]
        )
        backward += _unsharded_weight_bytes(priced, blocks) if self._gathers else 0.0
        if priced.strategy.pipeline == 1:
            backward += bucket
        step = bucket + _copied_bytes(priced, numel) + _returning_bytes(priced, numel)
        step += _matrix_update_bytes(priced, blocks)
        parameters, gradients, optimizer = round(states[0]), round(states[1]), round(states[2])
        saved, workspace = (
            round(activations),
            round(max(backward, step) - activations + self._framework),
        )
        live = parameters + gradients + optimizer + saved + workspace
        # The allocator keeps freed blocks, also those of the other phase: a step's buffers are too
        # large for the holes that activations leave. It frees them when the device is nearly full.
        slack = round(self._fragmentation * live + min(backward, step))
        slack = max(0, min(slack, usable - live))
        return parameters, gradients, optimizer, saved, workspace + slack

    def saved_activation_bytes(self, start: int, stop: int) -> float:
        """Return the saved activations of one micro-batch in these layers of a stage."""
        if self._checkpointed is self._saved:
            return self._saved[stop] - self._saved[start]
        until = self._priced.checkpointed_stop(start, stop)
        checkpointed = self._checkpointed[until] - self._checkpointed[start]
        return checkpointed + self._saved[stop] - self._saved[until]


def framework_bytes(priced: PricedLayout) -> float:
    """Return the bytes of the context and of the communicators, two for a pipeline.

    The communicators are the world's and one for each parallel axis. NCCL uses a channel or two on
    each link of a GPU, so its buffers grow with the number of links (NCCL's topology search: 24
    channels on an A100's 12 links of 25 GB/s, 12 on a V100's 6, no more on newer GPUs).
    """
    s, c = priced.strategy, priced.constants
    if priced.cluster.gpu.is_cpu:
        return c.cpu_framework_bytes
    groups = (
        (s.world_size > 1)
        + (s.zero_world_size > 1)
        + (s.context > 1)
        + (s.tensor > 1)
        + 2 * (s.pipeline > 1)
    )
    groups += (s.hpz_partition_size > 1) + (s.expert > 1) + (1 < s.expert < s.zero_world_size)
    channels = min(1.0, priced.cluster.intra_node_bytes_per_second / ALL_CHANNELS_BYTES_PER_SECOND)
    return c.context_bytes + groups * channels * c.communicator_bytes


def _gradient_bytes(priced: PricedLayout) -> int:
    """Per parameter: the gradient itself, and the float32 buffer beside it where half precision
    accumulates in fp32 (BF16_Optimizer at stage 1; stages 2 and 3 accumulate in the partition
    alone)."""
    accumulation = element_bytes(priced.accumulation_dtype)
    if priced.traits.fuses_accumulation or priced.traits.frees_gradients_after_add:
        # products add to the accumulated gradient itself (Megatron-LM's main_grad), or hooks do
        return accumulation
    if accumulation == priced.element_bytes or priced.strategy.zero_stage >= 2:
        return accumulation
    return priced.element_bytes + accumulation


def _saved_sums(
    priced: PricedLayout, saved: SavedActivations, *, saves_experts: bool
) -> list[float]:
    """Return the saved bytes of one micro-batch on one rank, prefix sums over graph.layers."""
    s, degree = priced.strategy, priced.shapes.attention_degree
    replicated, sharded = (
        np.array(saved.replicated, dtype=np.float64),
        np.array(saved.sharded, dtype=np.float64),
    )
    # A context rank has its share of each sequence's tokens and, in attention, of its heads.
    sequences = priced.sequences / s.context
    sums = (replicated / (degree if s.sequence_parallel else 1) + sharded / degree) * sequences
    if s.expert > 1 and saves_experts:  # tokens of other ranks
        by_kind = [*(imbalance_bytes(priced, kind) for kind in priced.shapes.kinds), 0.0]
        sums[1:] += np.cumsum(
            np.array(by_kind)[list(priced.shapes.kind_of)]
        )  # -1: no decoder layer
    result: list[float] = sums.tolist()
    return result


def _boundary_bytes(priced: PricedLayout) -> float:
    """Return a stage's output of a micro-batch, held until its gradient arrives.

    DeepSpeed's pipe_partitioned keeps one share on each tensor rank.
    """
    s = priced.strategy
    if s.pipeline == 1:
        return 0.0
    return (
        priced.graph.hidden_size
        / s.message_shards
        * priced.tokens
        * priced.element_bytes
        / s.virtual_stages
    )


def _is_recomputed_at_peak(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> bool:
    """Return whether a layer is recomputed while all activations are saved.

    Under partial checkpointing a stage with other layers runs those backward first, which frees
    their activations.
    """
    if priced.checkpointed_activations is None:
        return True
    ends = ((block, priced.checkpointed_stop(block.start, block.stop)) for block in blocks)
    return any(
        until - block.start - (block.start == 0) == priced.decoder_layers(block) > 0
        for block, until in ends
    )


def _working_bytes(priced: PricedLayout, with_head: bool, recomputes: bool) -> float:
    """Return short-lived bytes: a layer in its backward pass, or the loss, whichever is more, and
    masks.

    Excludes what depends on a rank's number of parameters.

    recomputes: see _is_recomputed_at_peak
    """
    s, c, saved = priced.strategy, priced.constants, priced.activations

    def full_sequence_bytes(share: ActivationBytes) -> float:
        return priced.sequences * share.on_rank(
            priced.shapes.attention_degree, sequence_parallel=s.sequence_parallel
        )

    def held(share: ActivationBytes) -> float:
        return full_sequence_bytes(share) / s.context

    recomputed = (priced.checkpointed_activations or saved).recomputed
    layer = recomputes * held(recomputed) + c.backward_share * held(saved.largest)
    # Count the recomputed tokens and their gradient.
    exchanged = (
        2 * imbalance_bytes(priced, kind) + dispatch_buffer_bytes(priced, kind)
        for kind in priced.shapes.kinds
    )
    layer += max(exchanged, default=0.0)
    if s.overlapped_share:  # a layer of the next micro-batch is saved before this one is freed
        layer += held(saved.largest)
    loss = 0.0
    if with_head and priced.graph.task_traits.compares_pairs:
        loss = contrastive_loss_bytes(priced) + held(saved.head)
    elif with_head:
        logits = c.of_family("logit_bytes", priced.kernels.loss_family) * priced.shapes.head_width
        retained = _retained_output_bytes(priced)
        layer += retained
        loss = priced.logit_tokens * logits + held(saved.head)
        loss += max(0.0, retained - _output_bytes(priced))
        if s.loss == "chunked" and not priced.language_model_is_frozen:
            # The chunks' gradients of the head's weight are summed in a buffer of their own.
            loss += priced.shapes.head_width * priced.graph.hidden_size * priced.element_bytes
    # Each context rank has masks of the whole sequence.
    return max(layer, loss) + full_sequence_bytes(saved.context)


def _unsharded_weight_bytes(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Return ZeRO-3's gathered weights at the peak.

    They are the layer in use and the prefetched one, as far as DeepSpeed allows both, or those that
    stay gathered from the forward to the backward pass.
    """
    s = priced.strategy
    layers, widest = (
        2 * priced.shapes.largest_layer(s.expert),
        priced.shapes.largest_product(s.expert),
    )
    resident = (
        0.0
        if priced.traits.zero3_gathers_flat_layers
        else unsharded_weights(priced, blocks).resident
    )
    return max(min(layers, LIVE_NUMEL + widest), resident) * priced.element_bytes


def _output_bytes(priced: PricedLayout) -> float:
    """Return the loss's input of one micro-batch: logits, or hidden states for a chunked loss."""
    width = (
        priced.graph.hidden_size if priced.strategy.loss == "chunked" else priced.shapes.head_width
    )
    return priced.tokens * width * priced.element_bytes


def _retained_output_bytes(priced: PricedLayout) -> float:
    """Under 1F1B DeepSpeed's last stage does not clear a micro-batch's output after its backward
    pass, and has two buffers for them (pipe/engine.py, _exec_backward_pass; pipe/schedule.py,
    TrainSchedule.num_pipe_buffers)."""
    s = priced.strategy
    if s.pipeline == 1 or not s.pipeline_schedule.retains_outputs:
        return 0.0
    return min(priced.traits.saved_stage_outputs, s.gradient_accumulation_steps) * _output_bytes(
        priced
    )


def _bucket_bytes(priced: PricedLayout, numel: int) -> float:
    """Return ZeRO's communication bucket, in the backward pass and in the step.

    Megatron's optimizer reduces and gathers in the gradients' and parameters' own buffers. A
    pipeline allocates it after the last backward pass (DeepSpeed stage_1_and_2.py,
    reduce_gradients).
    """
    s = priced.strategy
    if s.zero_stage == 0 or s.zero_world_size == 1 or priced.traits.fuses_accumulation:
        return 0.0
    return min(BUCKET_NUMEL, numel) * priced.element_bytes


def _copied_bytes(priced: PricedLayout, numel: int) -> float:
    """Return the float32 copy of a rank's gradients in the optimizer's step.

    Exists where gradients are accumulated in lower precision (DeepSpeed stage_1_and_2.py, step).
    """
    s = priced.strategy
    copied = (
        element_bytes(priced.accumulation_dtype) < 4
        and 1 <= s.zero_stage <= 2
        and s.offload == "none"
    )
    return 4 * numel / s.zero_world_size if copied else 0.0


def _returning_bytes(priced: PricedLayout, numel: int) -> float:
    """Return the fp32 copy of the largest tensor that comes back from a host's update.

    torch casts it to the weights' dtype on the GPU (ATen/native/cuda/Copy.cu, copies that do not
    block).
    """
    s = priced.strategy
    casts = priced.element_bytes < MASTER_BYTES
    if s.offload == "none" or not casts or not priced.traits.overlaps_host_update:
        return 0.0
    tensors = [p.n * p.k for kind in priced.shapes.kinds for p in kind.products]
    largest = max(priced.shapes.head_width * priced.graph.hidden_size, *tensors)
    return MASTER_BYTES * min(largest, numel / s.zero_world_size)


def _matrix_update_bytes(priced: PricedLayout, blocks: tuple[ModelChunk, ...]) -> float:
    """Return the temporary bytes of the update of matrices with states of their own.

    Adafactor's (engines/deepspeed/adafactor_optimizer.py) are the squares, the root and a copy of
    a rank's share of the largest weight. Muon's (parallel/newton_schulz.py) are a bucket of
    gathered weights or the copy of one, its result, and in an iteration X, two products and the
    next X of some experts. 8-bit AdamW's are a chunk's gradient, moments, squares and codes.
    Megatron's Muon has one fp32 matrix at a time, of one expert, with its shards where tensor ranks
    gather it.
    """
    if not priced.matrix_numel_of(blocks):
        return 0.0
    s = priced.strategy
    if priced.traits.repeats_orthogonalization:
        copies = 5 if s.tensor == 1 else 6
        return copies * priced.largest_matrix * MASTER_BYTES
    weight = priced.largest_matrices / (s.expert if s.shards_experts else 1)
    if OPTIMIZERS[priced.recipe.training.optimizer.name].quantizes:
        return 8 * MASTER_BYTES * min(CHUNK_BLOCKS * BLOCK, weight)
    if priced.factors:
        owners = s.zero_world_size if s.zero_stage == 3 else 1
        return 3 * MASTER_BYTES * weight / (s.tensor * owners)
    shares = s.zero_stage >= 1 or s.tensor > 1
    gathered = max(MUON_BUCKET_NUMEL, weight) if shares else weight
    gathered = min(gathered, s.tensor * priced.matrix_numel_of(blocks))
    return (gathered + weight + 4 * min(MUON_BUCKET_NUMEL, weight)) * priced.element_bytes
