"""Define Plan, every decision of a compile; plan.json is this record, field by field.

Other files that a run reads (ds_config.json, the model's configuration, the tokenizer) are recorded
by their digests.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.diagnostics import refusal
from shardwright.layout.axes import rank_coordinates
from shardwright.layout.device_kinds import CPU, GPU, DeviceKind
from shardwright.layout.fused_weights import FusedOrder, JoinedMatrices
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Memory, Time, Training
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.parameter_sharding import TensorParallelMap
from shardwright.layout.quantized_moments import is_quantized
from shardwright.models.model_files import RemoteCode
from shardwright.models.model_graph import PipelineSplit, name_pattern
from shardwright.models.tasks.task_traits import TASK_TRAITS, TaskTraits
from shardwright.recipe.learning_rate_schedules import scheduled_rate
from shardwright.recipe.literal_types import AutoSwitch, Kernels, Loss, TaskName
from shardwright.recipe.objectives import without_null_objective_keys
from shardwright.recipe.optimizer_keys import keys_without_effect
from shardwright.recipe.recipe_types import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    LoraSection,
    OptimizerSection,
    OuterSection,
    SchedulerFields,
    TrackingSection,
    TrainingFields,
    TrainingSection,
    ValidationSection,
)
from shardwright.utils.file_io import parse_strict_json, read_regular_text_file
from shardwright.utils.json_values import JsonObject, copy_shared_fields, read_record

PLAN_VERSION = 1
"""Names the fields and their meaning; a plan of another version is refused."""
MAX_PREDICTED = 1e30  # of seconds, bytes and tokens; sums and products of them are still finite
MAX_PLAN_BYTES = 2**30
"""Bounds plan.json: a hundred times that of the largest plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRouterAuxLoss:
    """Hold the routers' balance loss.

    affinity: what turns a router's logits into a token's affinity to each expert
        (models/mixture_of_experts.py)
    """

    coefficient: float
    affinity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """Describe the model that a run builds.

    config_file: path in the compiled folder
    weights_path: absolute folder of safetensors files where weights is "pretrained", else None
    revision: the commit of a model from the hub
    embedding_modules, head_modules: modules outside the decoder stack whose parameters the first
        and the last layer hold; a tied head names the embedding's module too; a parameter is listed
        by its own path where its module owns others' too, or holds the stack
    shared_parameters: names of those that both hold
    dropout: the largest probability in the model; 0 where nothing is random
    remote_code: the code of a type that transformers lacks; its files lie beside config_file
    router_aux_loss: None where routers get no balance loss
    frozen: parameters that are not trained, by name, or by pattern with * for numbers where all of
        them are
    vision_encoder_blocks: paths of the vision encoder's blocks, which full checkpointing recomputes
        like decoder layers
    transformer_engine: whether GPU ranks use Megatron-Core's Transformer Engine layers; auto: where
        it is installed
    """

    model_type: str
    architecture: str
    config_file: str
    config_hash: str
    weights: str
    weights_path: str | None
    revision: str | None
    attention: str
    loss: Loss
    cut: PipelineSplit
    embedding_modules: tuple[str, ...]
    head_modules: tuple[str, ...]
    attention_module: str
    tied: tuple[tuple[str, ...], ...]
    shared_parameters: tuple[str, ...]
    total_parameters: int
    vocabulary_size: int
    dropout: float
    remote_code: RemoteCode | None
    kernels: Kernels
    router_aux_loss: PlanRouterAuxLoss | None
    task: TaskName
    frozen: tuple[str, ...]
    vision_encoder_blocks: tuple[str, ...]
    transformer_engine: AutoSwitch

    def is_frozen(self, parameter: str) -> bool:
        """Return whether the parameter is frozen by `model.freeze` or never reached by a
        gradient."""
        return any(
            name in (*self.frozen, *self.cut.untrained)
            for name in (parameter, name_pattern(parameter))
        )

    @property
    def task_traits(self) -> TaskTraits:
        """The task's row of the table."""
        return TASK_TRAITS[self.task]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """Hold one pipeline stage: layers[first:first+len(layers)] of embedding, decoder..., head."""

    stage: int
    pipeline_rank: int
    first_layer: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLora(LoraSection):
    """Hold the LoRA section; target_modules: last path part of each adapted decoder module."""

    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLowPrecision:
    """Hold the format of `training.low_precision` and the paths of the linears that run in it.

    experts: names of the weights of stacked experts that run in it, too
    """

    format: str
    modules: tuple[str, ...]
    experts: tuple[str, ...]

    @property
    def weights(self) -> frozenset[str]:
        """Return the names of all weights that run in it."""
        return frozenset((*(f"{path}.weight" for path in self.modules), *self.experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRank:
    """Place one rank on a node and in the layout.

    parameter_bytes: resident parameters in the compute dtype, after tensor, pipeline and ZeRO-3
        sharding
    """

    rank: int
    node: int
    slot: int
    pipeline: int
    data: int
    context: int
    tensor: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTraining(TrainingFields):
    """Hold the training section; steps is 0 with `epochs`, until the data is prepared."""

    steps: int
    gradient_accumulation_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScheduler(SchedulerFields):
    """Hold the schedule, whose rates recipe/learning_rate_schedules.py computes.

    warmup_ratio: set while the number of steps is unknown; warmup_steps follows from it later
    """

    warmup_steps: int
    min_lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheckpoint(CheckpointSection):
    """Hold the checkpoint section; every_steps and in_memory_every are resolved where the recipe
    says auto."""

    every_steps: int | None
    in_memory_every: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiLoCo(OuterSection):
    """Hold DiLoCo's outer section; the plan's nodes, ranks and global batch are one island's.

    island: the number of this plan's island, from 0; None: the plan covers all islands
    """

    islands: int
    island: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Hold the predicted memory, step time and training time."""

    memory: Memory
    time: Time
    training: Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hold every decision of a compile.

    target: the engine that runs it
    versions: public version of each package that compiled it
    zero: how the engine shards states, in its own words
    digests: sha256 (hex) of each data file of the compiled folder
    experts: paths of modules whose parameters expert ranks shard along the first dimension, or
        tensor ranks hold unsharded; () where there are none
    outer: None without islands
    muon: pattern of a parameter's name (`*` for numbers) -> rows of each matrix that the parameter
        joins, () for one matrix; {} where AdamW has all parameters
    muon_orders: pattern in `muon` -> how the weight holds those rows, where they do not lie one
        after another
    """

    version: int
    name: str
    target: str
    recipe_hash: str
    versions: Mapping[str, str]
    model: PlanModel
    strategy: Layout
    nodes: int
    gpus_per_node: int
    gpu: str
    is_cpu: bool
    stages: tuple[PlanStage, ...]
    tensor_parallel: TensorParallelMap
    ranks: tuple[PlanRank, ...]
    training: PlanTraining
    optimizer: OptimizerSection
    scheduler: PlanScheduler
    data: DataSection
    checkpoint: PlanCheckpoint
    launch: LaunchSection
    predicted: Predicted
    zero: JsonObject
    extra: JsonObject
    tracking: TrackingSection | None
    validation: ValidationSection | None
    lora: PlanLora | None
    low_precision: PlanLowPrecision | None
    digests: Mapping[str, str]
    experts: tuple[str, ...]
    outer: PlanDiLoCo | None
    muon: Mapping[str, tuple[int, ...]]
    muon_orders: Mapping[str, FusedOrder]

    @property
    def device(self) -> DeviceKind:
        """Return the kind of device that the ranks run on."""
        return CPU if self.is_cpu else GPU

    @property
    def islands(self) -> int:
        """Return how many DiLoCo islands train together; 1 without an outer step."""
        return 1 if self.outer is None else self.outer.islands

    @property
    def island(self) -> int:
        """Return the island whose plan this is; 0 in a plan of all islands, or of none."""
        return 0 if self.outer is None else self.outer.island or 0

    @property
    def island_numbers(self) -> range:
        """Return the islands that have a folder of their own in this plan's; else an empty
        range."""
        return range(self.islands if self.outer is not None and self.outer.island is None else 0)

    @property
    def diloco(self) -> PlanDiLoCo:
        """Return the outer step of a plan that has one."""
        assert self.outer is not None, "the plan has no islands"
        return self.outer

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of one optimizer step of all islands together."""
        return self.training.global_batch_size * self.islands

    def expert_coordinates(self, rank: PlanRank) -> tuple[int, int]:
        """Return (expert-parallel coordinate, replica coordinate) of a rank.

        The ranks of a stage, tensor ranks adjacent, are ordered first by the shard of an expert,
        then by the experts that they hold.
        """
        s = self.strategy
        number = (rank.data * s.context + rank.context) * s.tensor + rank.tensor
        copy, expert = divmod(number // s.expert_tensor_ranks, s.expert)
        return expert, copy

    def expert_rank_of(self, rank: PlanRank) -> int:
        """Return the rank's expert-parallel coordinate."""
        return self.expert_coordinates(rank)[0]

    def is_expert_parameter(self, parameter: str) -> bool:
        """Return whether the parameter is sharded over expert ranks, unlike the rest of the
        model."""
        return parameter.rpartition(".")[0] in self.experts

    def muon_matrices(self, parameter: str) -> JoinedMatrices | None:
        """Return the matrices that a parameter joins; None where AdamW has it."""
        for name in (parameter, name_pattern(parameter)):
            if name in self.muon:
                order = self.muon_orders.get(name, FusedOrder())
                return JoinedMatrices(rows=self.muon[name], order=order)
        return None

    @property
    def matrix_elements(self) -> int:
        """Return the elements of the parameters whose optimizer states differ."""
        named = {p.name: p.shape for m in self.tensor_parallel.modules for p in m.parameters}
        row = OPTIMIZERS[self.optimizer.name]
        return sum(
            math.prod(shape)
            for name, shape in named.items()
            if (row.factors and len(shape) >= 2)
            or (row.quantizes and is_quantized(math.prod(shape)))
            or (self.muon and self.muon_matrices(name) is not None)
        )

    def expert_shard_count(self, parameter: str) -> int:
        """Return the equal shards of its first dimension, one for each expert rank, or 1."""
        return self.strategy.expert if self.is_expert_parameter(parameter) else 1

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return the stage boundaries over the layers."""
        last = self.stages[-1]
        return (*(s.first_layer for s in self.stages), last.first_layer + len(last.layers))

    def verify(self) -> None:
        """Raise ValueError where the plan contradicts itself, which is a bug of this project."""
        s = self.strategy
        if not s.world_size == self.nodes * self.gpus_per_node == len(self.ranks):
            raise ValueError(
                f"tensor x pipeline x data = {s.world_size}, ranks = {len(self.ranks)}"
            )
        if (
            s.micro_batch_size * s.gradient_accumulation_steps * s.data
            != self.training.global_batch_size
        ):
            raise ValueError(
                "micro_batch_size x gradient_accumulation_steps x data is not the global batch"
            )
        if any(part.packs_pairs for part in self.data.mixture or (self.data,)) != bool(
            self.training.objective.packed
        ):
            raise ValueError("pairs are packed in its data or for its objective, not for both")
        taken = s.expert * s.expert_tensor_ranks
        if (s.zero_world_size * s.tensor) % taken or s.shards_experts != bool(self.experts):
            raise ValueError(
                f"expert {s.expert} over {s.zero_world_size} data x context ranks, "
                f"{len(self.experts)} modules"
            )
        if len(self.stages) != s.total_stages or any(not stage.layers for stage in self.stages):
            raise ValueError(
                f"{len(self.stages)} stages in the plan, {s.total_stages} in the layout"
            )
        layers = [name for stage in self.stages for name in stage.layers]
        if len(layers) != len(set(layers)):
            raise ValueError("a layer is on two stages")
        if outside := [
            name for name in self.digests if name.startswith("/") or ".." in name.split("/")
        ]:
            raise ValueError(f"{outside[0]!r} is not a file of the compiled folder")
        for number, (r, at) in enumerate(
            zip(self.ranks, rank_coordinates(s.degrees()), strict=True)
        ):
            if r.rank != number:
                raise ValueError(f"rank {r.rank} is listed at index {number}")
            if any(getattr(r, axis) != place for axis, place in at.items()):
                raise ValueError(
                    f"rank {r.rank} does not have the coordinates of DeepSpeed's topology"
                )
            if r.rank != r.node * self.gpus_per_node + r.slot:
                raise ValueError(f"rank {r.rank} is not on slot {r.slot} of node {r.node}")
        time, memory = self.predicted.time, self.predicted.memory
        figures = (time.step_seconds, time.tokens_per_second_per_gpu, memory.peak_bytes)
        if min(*figures, memory.capacity_bytes) < 0 or max(figures) > MAX_PREDICTED:
            raise ValueError("`predicted` has a number that no prediction has")


def resolve_scheduler(training: TrainingSection, steps: int) -> PlanScheduler:
    """Resolve ratios to steps and learning rates; warmup_ratio rounds to the nearest step."""
    s, lr = training.scheduler, training.optimizer.lr
    warmup = round(s.warmup_ratio * steps) if s.warmup_ratio is not None else s.warmup_steps or 0
    min_lr = s.min_lr_ratio * lr if s.min_lr_ratio is not None else s.min_lr or 0.0
    ratio = s.warmup_ratio if training.epochs is not None else None
    return copy_shared_fields(
        PlanScheduler, s, warmup_steps=warmup, min_lr=min_lr, warmup_ratio=ratio
    )


def zero_learning_rate_updates(training: TrainingSection) -> int:
    """Count which of the first and the last update have learning rate 0.

    The last one has it where a curve ends at 0, the first one where a warm-up begins at step 0. A
    run that ends in its warmup has none.
    """
    steps = training.step_count_or_zero
    scheduler = resolve_scheduler(training, steps)
    ends = {1, steps} if steps else set[int]()
    return sum(
        scheduled_rate(training.optimizer.lr, scheduler, steps, update) == 0 for update in ends
    )


# Reading plan.json is strict: an unknown or missing key is an error.


def plan_to_json(plan: Plan) -> str:
    """Return the text of plan.json: one-space indent, a final newline."""
    return json.dumps(plan_document(plan), indent=1, ensure_ascii=False) + "\n"


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the content of plan.json, in field order; the optimizer and the objective without the
    keys that they do not take."""
    document = dataclasses.asdict(plan)
    for key in keys_without_effect(plan.optimizer.name):
        del document["optimizer"][key]
    document["training"] = dict(without_null_objective_keys(document["training"]))
    return document


def plan_from_json(text: str) -> Plan:
    """Parse plan.json. Raises ValueError where the text is no plan, or one of another version."""
    document = parse_strict_json(text)
    if isinstance(document, dict) and document.get("version") != PLAN_VERSION:
        raise ValueError(f"plan.json has version {document.get('version')}, not {PLAN_VERSION}")
    plan = read_record(Plan, document)
    plan.verify()
    return plan


def read_plan(folder: Path) -> Plan:
    return plan_from_json(read_regular_text_file(folder / "plan.json", MAX_PLAN_BYTES))


def load_plan(folder: Path) -> Plan:
    """Read the plan of a compiled folder. Raises Refusal with SW6001 where there is none."""
    try:
        return read_plan(folder)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            why = "it has no plan.json"
        elif isinstance(error, OSError):
            why = f"plan.json cannot be read: {error.strerror}"
        message = f"{str(folder)!r} is not a compiled folder: {why}"
        raise refusal(
            "SW6001", message, "Make one with `shardwright compile RECIPE -o DIR`."
        ) from None
