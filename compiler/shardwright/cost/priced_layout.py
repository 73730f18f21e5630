"""Define PricedLayout: a layout with the shapes, sizes and constants that its costs depend on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from shardwright.cost.calibrated_costs import (
    calibration_for,
    measured_activation_bytes,
    representative_layers,
)
from shardwright.cost.collective_seconds import Group, group_of
from shardwright.cost.cost_constants import Constants
from shardwright.cost.layer_shapes import ModelShapes, SavedActivations, activations, model_shapes
from shardwright.cost.vision_encoder_flops import vision_encoder_activation_bytes
from shardwright.engines.engine_definition import EngineTraits
from shardwright.engines.engine_table import norms_are_fused, traits_of
from shardwright.engines.run_profiles import KernelProfile, kernel_profile
from shardwright.layout.formats import LOW_PRECISION_FORMATS, accumulation_dtype, element_bytes
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.interleaved_schedule import micro_batches_in_flight
from shardwright.layout.layout import Layout, chunk_length
from shardwright.layout.muon_matrices import newton_schulz_flops
from shardwright.layout.optimizer_matrices import factor_elements, matrix_parameters
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.planning_problem import Problem
from shardwright.layout.tensor_parallel_map import split_parameter
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import Layer, ModelGraph, Parameter
from shardwright.models.trainable_parameters import (
    adapted_modules,
    adapter_sizes,
    frozen_parameter_names,
    is_decoder_frozen,
)
from shardwright.recipe.literal_types import LayerCheckpointing, PartialCheckpointing
from shardwright.recipe.objectives import SCORING_HEAD
from shardwright.recipe.recipe_types import OptimizerSection, Recipe
from shardwright.utils.memoize import memoize


class ModelChunk(
    NamedTuple
):  # a search creates tens of thousands, and a frozen dataclass takes four times as long
    """Hold contiguous layers [start, stop) on one pipeline rank; DualPipeV gives a rank two.

    in_flight: micro-batches whose activations are saved at once
    """

    start: int
    stop: int
    in_flight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """Hold a layout and all that its memory and time depend on.

    checkpointed_activations: of each stage's first layers, where only those are checkpointed
    boundaries: of the stages, over graph.layers; () until layers are assigned to stages
    ranks: chunks of each pipeline rank
    adapter_sizes: elements of LoRA's adapters and of a reward model's head beside them, prefix sums
        over graph.layers; () without LoRA
    frozen: local parameters of `model.freeze`, prefix sums; () where there are none
    matrices: local parameters of matrices with other optimizer states
        (layout/optimizer_matrices.py), prefix sums; () where none have
    shared_matrices, shared_factors: those that are in the first and in the last layer
    newton_schulz_flops: an update's, of the unsharded matrices, prefix sums; () without Muon
    factors: elements of the matrices' factored moments, which all ranks of a stage hold, prefix
        sums; () where none are factored
    largest_matrices: elements of the largest unsharded weight among them, all experts included
    largest_matrix: elements of the largest one of them, one of a stack
    """

    problem: Problem
    strategy: Layout
    constants: Constants
    shapes: ModelShapes
    activations: SavedActivations
    traits: EngineTraits
    kernels: KernelProfile
    element_bytes: int
    accumulation_dtype: str
    checkpointed_activations: SavedActivations | None = None
    boundaries: tuple[int, ...] = ()
    ranks: tuple[tuple[ModelChunk, ...], ...] = ()
    adapter_sizes: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    matrices: tuple[int, ...] = ()
    shared_matrices: int = 0
    shared_factors: int = 0
    newton_schulz_flops: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()
    largest_matrices: int = 0
    largest_matrix: int = 0

    @property
    def recipe(self) -> Recipe:
        return self.problem.recipe

    @property
    def graph(self) -> ModelGraph:
        return self.problem.graph

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    def group(self, ranks: int, stride: int) -> Group:
        """Return the group of `ranks` ranks, `stride` apart, over the fabric of the recipe or
        of the engine's traits."""
        return group_of(self.cluster, ranks, stride, self.traits.fabric)

    @property
    def sequences(self) -> int:
        """Return the sequences of one micro-batch, which may be several of an example."""
        return self.recipe.training.sequences_of(self.strategy.micro_batch_size)

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch on one rank."""
        return self.sequences * self.length

    @property
    def length(self) -> int:
        """Return the tokens of a sequence on one rank."""
        return self.recipe.training.sequence_length // self.strategy.context

    @property
    def logit_tokens(self) -> int:
        """Return the tokens of a micro-batch whose logits are in memory at a time."""
        if self.strategy.loss == "full":
            return self.tokens
        return self.sequences * chunk_length(self.sequences, self.length)

    def has_head(self, blocks: tuple[ModelChunk, ...]) -> bool:
        layers = len(self.shapes.kind_of)
        return any(block.start < block.stop == layers for block in blocks)

    def decoder_layers(self, block: ModelChunk) -> int:
        """Count the chunk's layers without embedding and head."""
        ends = (block.start == 0) + (block.stop == len(self.graph.layers))
        return max(0, block.stop - block.start - ends)

    def checkpointed_stop(self, start: int, stop: int) -> int:
        """Return the end of a stage's layers that partial checkpointing recomputes; `start`
        without it."""
        choice = self.strategy.activation_checkpointing
        if not isinstance(choice, PartialCheckpointing):
            return start
        chunks = self.strategy.total_stages // self.strategy.stages
        full = -(-choice.full // chunks)  # a rank's chunks share its layers evenly
        return max(start, min(start + (start == 0) + full, stop - (stop == len(self.graph.layers))))

    def numel(self, rank: int) -> int:
        """Return the parameters of one rank of this pipeline rank."""
        return self.numel_of_chunks(self.ranks[rank])

    def trainable_numel_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the parameters with a gradient; LoRA's adapters are not among numel_of_chunks."""
        if self.adapter_sizes:
            return sum(self.adapter_sizes[b.stop] - self.adapter_sizes[b.start] for b in blocks)
        return self.numel_of_chunks(blocks) - self.frozen_numel_of(blocks)

    def frozen_numel_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the parameters of `model.freeze`."""
        return sum(self.frozen[b.stop] - self.frozen[b.start] for b in blocks) if self.frozen else 0

    def matrix_numel_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the parameters of matrices with other optimizer states; a tied one counts
        once."""
        return self._once(blocks, self.matrices, self.shared_matrices)

    def factor_numel_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the elements of factored moments of these layers, a tied one's once."""
        return self._once(blocks, self.factors, self.shared_factors)

    def _once(self, blocks: tuple[ModelChunk, ...], sums: tuple[int, ...], shared: int) -> int:
        if not sums:
            return 0
        total = sum(sums[b.stop] - sums[b.start] for b in blocks)
        return total - (shared if blocks[0].start == 0 and self.has_head(blocks) else 0)

    def newton_schulz_flops_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the FLOPs of the Newton-Schulz iterations of an update of these layers."""
        sums = self.newton_schulz_flops
        return sum(sums[b.stop] - sums[b.start] for b in blocks) if sums else 0

    @property
    def has_frozen(self) -> bool:
        """Return whether some of the model's own parameters are frozen."""
        return bool(self.adapter_sizes or self.frozen)

    @property
    def language_model_is_frozen(self) -> bool:
        """Return whether no weight of a decoder layer has a gradient."""
        return bool(self.adapter_sizes) or is_decoder_frozen(self.graph, self.recipe.model.freeze)

    def expert_numel_of(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the parameters of experts that expert ranks shard."""
        if not self.strategy.shards_experts:
            return 0
        numel = self.shapes.expert_numel
        return sum(numel[b.stop] - numel[b.start] for b in blocks)

    def numel_of_chunks(self, blocks: tuple[ModelChunk, ...]) -> int:
        """Return the parameters of a rank with these chunks, all experts included; a tied tensor
        counts once."""
        numel = self.shapes.numel
        total = sum([numel[b.stop] - numel[b.start] for b in blocks])
        shared = self.shapes.shared_numel
        return total - (shared if shared and blocks[0].start == 0 and self.has_head(blocks) else 0)


def build_priced_layout(problem: Problem, strategy: Layout, constants: Constants) -> PricedLayout:
    """Build a PricedLayout without stages; see `with_boundaries`."""
    recipe, graph = problem.recipe, problem.graph
    weight_bytes = element_bytes(recipe.training.precision)
    is_partial = isinstance(strategy.activation_checkpointing, PartialCheckpointing)
    kernels = kernel_profile(recipe.assume.kernels, graph.model_type, recipe.target)

    traits = traits_of(recipe.target, recipe.assume.kernels, strategy)
    low = (
        LOW_PRECISION_FORMATS.get(recipe.training.low_precision)
        if traits.low_precision_inputs_saved
        else None
    )

    def saved(checkpointing: LayerCheckpointing) -> SavedActivations:
        length = recipe.training.sequence_length
        if (
            checkpointing == "selective"
            and (kernels.traces_activations or recipe.assume.kernels == "auto")
            and not traits.selective_recomputes_projections
        ):
            checkpointing = ("core_attn",)
        fused = isinstance(checkpointing, tuple) and norms_are_fused(problem, strategy)
        traced = activations(
            graph,
            length,
            weight_bytes,
            checkpointing,
            kernels,
            norms_are_fused=fused,
            linear_input_bytes=None if low is None else low.input_bytes,
        )
        return _add_vision_encoder(
            problem, checkpointing, _as_measured(problem, strategy, checkpointing, traced)
        )

    return PricedLayout(
        problem=problem,
        strategy=strategy,
        constants=constants,
        shapes=model_shapes(graph, strategy.tensor),
        activations=saved("none" if is_partial else strategy.checkpointing),
        traits=traits,
        kernels=kernels,
        checkpointed_activations=saved("full") if is_partial else None,
        element_bytes=weight_bytes,
        accumulation_dtype=accumulation_dtype(recipe.training),
        adapter_sizes=_adapters(recipe, graph),
        frozen=()
        if recipe.lora is not None
        else _frozen(graph, recipe.model.freeze, strategy.tensor),
        **_matrices(recipe, graph, strategy),
    )


def _as_measured(
    problem: Problem, s: Layout, checkpointing: LayerCheckpointing, traced: SavedActivations
) -> SavedActivations:
    """Replace the decoder layers' traced bytes by measured ones, scaled equally on every tensor
    rank."""
    recipe, graph = problem.recipe, problem.graph
    if calibration_for(recipe, graph) is None:
        return traced
    shapes = model_shapes(graph, s.tensor)
    factors = []
    for at, place in enumerate(representative_layers(shapes.kind_of)):
        share = traced.between(at, at + 1).on_rank(
            shapes.attention_degree, sequence_parallel=s.sequence_parallel
        )
        measured = (
            measured_activation_bytes(recipe, graph, s, place, checkpointing)
            if shapes.kind_of[at] >= 0
            else None
        )
        factors.append(
            measured / (share * recipe.training.sequences_of(s.micro_batch_size))
            if measured and share
            else 1.0
        )

    def prefix(sums: tuple[float, ...]) -> tuple[float, ...]:
        return (
            0,
            *itertools.accumulate(
                (b - a) * f for (a, b), f in zip(itertools.pairwise(sums), factors, strict=True)
            ),
        )

    return dataclasses.replace(
        traced, replicated=prefix(traced.replicated), sharded=prefix(traced.sharded)
    )


def _add_vision_encoder(
    problem: Problem, checkpointing: LayerCheckpointing, found: SavedActivations
) -> SavedActivations:
    """Add the vision encoder's saved bytes of a sequence to the embedding's."""
    recipe, graph = problem.recipe, problem.graph
    if graph.vision is None or isinstance(checkpointing, tuple):
        return found
    encoder_bytes = vision_encoder_activation_bytes(
        recipe, graph, checkpointing, element_bytes(recipe.training.precision)
    )
    if not encoder_bytes:
        return found
    return dataclasses.replace(
        found,
        replicated=(0, *(bytes_before + encoder_bytes for bytes_before in found.replicated[1:])),
    )


def with_boundaries(priced: PricedLayout, boundaries: tuple[int, ...]) -> PricedLayout:
    """Assign layers to stages; boundaries: over graph.layers, one more than stages."""
    s = priced.strategy

    def stages_of(rank: int) -> tuple[int, ...]:
        if s.is_interleaved:
            return tuple(range(rank, s.total_stages, s.pipeline))
        return (rank, s.stages - 1 - rank)[: s.stages // s.pipeline]

    ranks = tuple(
        tuple(
            ModelChunk(start=boundaries[part], stop=boundaries[part + 1], in_flight=flight)
            for part, flight in zip(stages_of(rank), in_flight(s, rank), strict=True)
        )
        for rank in range(s.pipeline)
    )
    return dataclasses.replace(priced, boundaries=boundaries, ranks=ranks)


def in_flight(s: Layout, rank: int) -> tuple[float, ...]:
    """Return the micro-batches whose activations each stage of the rank saves at once.

    1F1B: min(p - rank, m). DualPipeV (arXiv 2412.19437, V-shaped): min(2p - rank, m) outward and
    min(rank + 1, m) on the way back. Interleaving: see layout.interleaved_schedule.
    """
    p, m, v = s.pipeline, s.gradient_accumulation_steps, s.virtual_stages
    if s.pipeline_schedule.is_v_shaped:
        return min(2 * p - rank, m), min(rank + 1, m)
    return micro_batches_in_flight(p, rank, v, m) if s.is_interleaved else (min(p - rank, m),)


def _adapters(recipe: Recipe, graph: ModelGraph) -> tuple[int, ...]:
    lora = recipe.lora
    if lora is None:
        return ()
    names = adapted_modules(graph, lora)

    def trained(layer: Layer) -> int:
        heads = (p.numel for p in layer.parameters if p.name == f"{SCORING_HEAD}.weight")
        return sum(adapter_sizes(layer, names, lora.rank)) + (sum(heads) if scores else 0)

    scores = graph.task_traits.scores_sequences  # their head is trained in full
    return (0, *itertools.accumulate(map(trained, graph.layers)))


@memoize(lambda graph, freeze, tensor: (graph.identity, freeze, tensor))
def _frozen(graph: ModelGraph, freeze: tuple[str, ...], tensor: int) -> tuple[int, ...]:
    """Return the frozen elements on one tensor rank, prefix sums over graph.layers; () where none
    are.

    A tied tensor counts at its first layer.
    """
    names = frozen_parameter_names(graph, freeze)
    if not names:
        return ()
    counted: set[str] = set()
    numel = []
    for layer in graph.layers:
        own = [p for p in layer.parameters if p.name in names and p.name not in counted]
        counted.update(p.name for p in own)
        numel.append(sum(split_parameter(graph, p, tensor).shard_numel(0) for p in own))
    return (0, *itertools.accumulate(numel))


class _MatrixSums(TypedDict, total=False):
    matrices: tuple[int, ...]
    shared_matrices: int
    shared_factors: int
    newton_schulz_flops: tuple[int, ...]
    factors: tuple[int, ...]
    largest_matrices: int
    largest_matrix: int


def _matrices(recipe: Recipe, graph: ModelGraph, strategy: Layout) -> _MatrixSums:
    """Return the fields of the matrices with other optimizer states; {} where none have."""
    optimizer, expert = recipe.training.optimizer, strategy.expert if strategy.shards_experts else 1
    if not matrix_parameters(optimizer.name, graph, recipe.model.freeze):
        return {}
    return _matrix_sums(graph, recipe.model.freeze, strategy.tensor, expert, optimizer)


@memoize(
    lambda graph, freeze, tensor, expert, optimizer: (
        graph.identity,
        freeze,
        tensor,
        expert,
        optimizer.name,
        optimizer.ns_steps,
    )
)
def _matrix_sums(
    graph: ModelGraph,
    freeze: tuple[str, ...],
    tensor: int,
    expert: int,
    optimizer: OptimizerSection,
) -> _MatrixSums:
    found = matrix_parameters(optimizer.name, graph, freeze)
    ends = ({p.name for p in graph.layers[at].parameters} for at in (0, -1))
    both, experts = set.intersection(*ends), expert_modules(graph)

    def numel(p: Parameter) -> int:
        return split_parameter(graph, p, tensor).shard_numel(0)

    def factors(p: Parameter) -> int:
        is_split = p.name.rpartition(".")[0] in experts
        return factor_elements(p) // (expert if is_split else 1)

    sums = _MatrixSums(
        matrices=_sums(graph, found, numel),
        shared_matrices=sum(numel(p) for p in found if p.name in both),
        largest_matrices=max(p.numel for p in found),
        largest_matrix=max(math.prod(p.shape[-2:]) for p in found),
    )
    if steps := optimizer.ns_steps:
        flops = functools.partial(newton_schulz_flops, graph, steps=steps)
        sums["newton_schulz_flops"] = _sums(graph, found, flops)
    if OPTIMIZERS[optimizer.name].factors:
        sums["factors"] = _sums(graph, found, factors)
        sums["shared_factors"] = sum(factors(p) for p in found if p.name in both)
    return sums


def _sums(
    graph: ModelGraph, found: tuple[Parameter, ...], size: Callable[[Parameter], int]
) -> tuple[int, ...]:
    """Return prefix sums over graph.layers of these parameters' sizes."""
    names = {p.name for p in found}
    own = (sum(size(p) for p in each.parameters if p.name in names) for each in graph.layers)
    return (0, *itertools.accumulate(own))
