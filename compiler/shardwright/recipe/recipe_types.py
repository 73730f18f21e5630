"""Defines the recipe's typed records. Field names are the recipe's own keys; `None` stands for
`auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwright.diagnostics import KeyPath, Source
from shardwright.recipe.literal_types import (
    FAILURE_CAUSES,
    AutoSwitch,
    ExpertDispatcher,
    Fabric,
    FailureCause,
    Kernels,
    LayerCheckpointing,
    Loss,
    LowPrecision,
    Objective,
    Offload,
    PartialCheckpointing,
    Precision,
    Schedule,
    TaskName,
)
from shardwright.recipe.measurements import MeasurementsFile
from shardwright.recipe.objectives import PLAIN_OBJECTIVE, PREFERENCE_KIND, ObjectiveSection
from shardwright.utils.json_values import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSection:
    project: str
    entity: str | None
    name: str | None  # None: the recipe's


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleSection:
    """Configures the gradient noise scale. every_steps: interval between measured steps. rows:
    first sequences of such a step that are measured, up to the end of a micro-batch."""

    every_steps: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    tensorboard: bool
    wandb: WandbSection | None
    noise_scale: NoiseScaleSection | None = None


FREE_DEGREES = ("tensor", "pipeline", "data")
"""Lists the degrees that make up the world size in a recipe that pins no other; data is the
last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Names the model by exactly one of `source` (hub id or absolute folder) and `config`.

    freeze: untrained parts of a vision-language model (models/trainable_parameters.py), and
    patterns of parameter names."""

    source: str | None
    config: JsonObject | None
    revision: str
    weights: str  # pretrained | random
    attention: str  # auto | sdpa | eager | flash_attention_2
    loss: Loss | Literal["auto"]
    kernels: Kernels | Literal["auto"] = "hf"
    trust_remote_code: str | None = (
        None  # the same as source, or None: code of the model's own never runs
    )
    router_aux_loss: float | None = None
    task: TaskName | Literal["auto"] = "auto"
    freeze: tuple[str, ...] = ()
    transformer_engine: AutoSwitch = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Holds measured rates of fused causal attention on long sequences, half the scores counted."""

    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineGpu:
    """Describes a GPU that the catalogue lacks. peak_tflops: dense, by precision. The rest is None
    where the recipe leaves it out (layout/gpu_cluster.py says what that means)."""

    memory_gib: float
    hbm_gbytes_per_second: float
    peak_tflops: Mapping[str, float]
    watts: float | None = None
    compute_units: int | None = None
    cache_mib: float | None = None
    attention: AttentionRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """Describes the cluster. node_mtbf_hours, checkpoint_gbytes_per_second: None is the default in
    cost/goodput.json.

    islands: equal groups of nodes with slow links between them, inter_island_gbits_per_second each,
    one direction. nodes: per island. nvlink_domain_gpus: GPUs that NVLink joins, also beyond a
    node; None is the catalogue's number.
    """

    nodes: int | None
    gpus_per_node: int
    gpu: str | InlineGpu
    intra_node_gbytes_per_second: float | None
    inter_node_gbits_per_second: float | None
    host_memory_gib: float | None
    shared_filesystem: bool
    price_per_gpu_hour: float | None
    node_mtbf_hours: float | None = None
    checkpoint_gbytes_per_second: float | None = None
    measured: MeasurementsFile | None = None
    fabric: Fabric | None = None
    nvlink_domain_gpus: int | None = None
    islands: int = 1
    inter_island_gbits_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSection:
    """Configures the outer step, every_steps inner steps apart. lr, momentum: of nesterov, else
    None.

    precision: of what is sent. mixing: weight of the outer result, overlap_steps later; None
    without overlap. deadline_seconds: how long a round waits for an island."""

    every_steps: int
    optimizer: Literal["average", "nesterov"]
    lr: float | None
    momentum: float | None
    precision: Literal["bf16", "fp32"]
    overlap_steps: int
    deadline_seconds: float
    mixing: float | None = None

    def is_due(self, step: int, steps: int) -> bool:
        """Tell whether an outer step follows `step` of `steps`."""
        return step % self.every_steps == 0 or step == steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """Holds the optimizer. momentum, ns_steps, adamw_lr: of Muon, which has `lr`, while AdamW has
    `betas` and `eps`. beta2_decay, clip_threshold, scale_parameter, scale_eps: of Adafactor. None
    under other optimizers: recipe/optimizer_keys.py lists which takes which."""

    name: str  # a row of layout/optimizers.py
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float
    momentum: float | None = None
    ns_steps: int | None = None
    adamw_lr: float | None = None
    beta2_decay: float | None = None
    clip_threshold: float | None = None
    scale_parameter: bool | None = None
    scale_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFields:
    """Holds the fields of the learning rate schedule that recipes and plans share."""

    name: str  # a row of recipe/learning_rate_schedules.py, with the keys that it takes
    warmup_steps: int | None
    min_lr: float | None
    decay_steps: int | None
    warmup_ratio: float | None = None
    num_cycles: float | None = None
    power: float | None = None
    lr_end: float | None = None
    timescale: int | None = None
    warmup_lr_rate: float | None = None
    warmup_type: str | None = None
    decay_type: str | None = None
    first_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection(SchedulerFields):
    """Holds the recipe's schedule; stage 6 resolves `warmup_ratio`, `min_lr_ratio` and
    `decay_steps` against the steps."""

    min_lr_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFields:
    """Holds the fields of the training that recipes and plans share.

    stop_after_nonfinite: consecutive non-finite losses after which the run ends; 0 is never.
    """

    sequence_length: int
    global_batch_size: int
    steps: int | None
    precision: Precision
    gradient_accumulation_dtype: str | None  # None = auto
    gradient_clipping: float
    seed: int
    epochs: float | None = None
    stop_after_nonfinite: int = 10
    objective: ObjectiveSection = PLAIN_OBJECTIVE

    def sequences_of(self, examples: int) -> int:
        """Return the sequences of as many examples as a batch size counts."""
        if self.objective.packed:
            return examples
        return examples * self.objective.traits.sequences_per_example

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_of(self.global_batch_size) * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection(TrainingFields):
    """Holds the recipe's training section, with exactly one of steps, tokens, epochs.
    global_batch_size: per island. outer: None without islands. low_precision_keep: linears that
    compute in `precision`, by path, name or pattern."""

    tokens: int | None
    optimizer: OptimizerSection
    scheduler: SchedulerSection
    days_at_most: float | None
    outer: OuterSection | None = None
    low_precision: LowPrecision = "none"
    low_precision_keep: tuple[str, ...] = ()

    @property
    def step_count_or_zero(self) -> int:
        """Return the optimizer steps; 0 where `epochs` decides, as only `prepare` counts the
        data."""
        return (
            optimizer_steps(
                self.steps,
                self.tokens,
                self.sequences_of(self.global_batch_size),
                self.sequence_length,
            )
            or 0
        )


def optimizer_steps(
    steps: int | None, tokens: int | None, batch: int | None, sequence_length: int | None
) -> int | None:
    """Return `steps`, or ceil(tokens / (batch x S)); None where neither is known. batch: in
    sequences."""
    if tokens and batch and sequence_length:
        return -(-tokens // (batch * sequence_length))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesSection:
    """Bounds the images of a conversation: their number, and the pixels (width x height) of each
    after resizing.

    tiles: whether the processor may cut an image into tiles. folder: absolute folder of the images;
    None is the folder of the file that names them."""

    per_row: int
    max_pixels: int
    tiles: bool = True
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Describes a data set. Keys that a kind lacks have their defaults.

    path: a glob for text, jsonl, parquet, chat; in a plan None for synthetic. tokenizer: "byte", a
    HF name, or an absolute folder; in a plan "byte", a folder relative to the compiled one, or None
    for kinds that hold token ids.
    field: of jsonl and parquet. messages, template, train_on: of chat. images: of chat for a
    vision-language model. skip_damaged: share of the records that may be skipped. add_bos_token:
    whether documents of text, jsonl and parquet begin with it; auto: as the tokenizer does.
    mixture: the parts of kind "mixture" with their weights; shuffle applies to all parts.
    labelled: of preference: single completions with labels, as the objective takes them. scored: of
    preference: a reward model scores each whole sequence, and its last token is the only label.
    """

    kind: (
        str  # text | jsonl | parquet | chat | preference | tokens | megatron | synthetic | mixture
    )
    path: str | None  # made absolute; the words of BUILT_IN_DATASETS stay
    tokenizer: str | None
    packing: bool
    shuffle: bool
    field: str = "text"
    messages: str = "messages"
    template: str | None = None
    train_on: str = "assistant"  # assistant | all
    images: ImagesSection | None = None
    skip_damaged: float = 0.0
    add_bos_token: bool | str = "auto"  # auto | True | False
    weight: float = 1.0
    mixture: tuple[DataSection, ...] = ()
    labelled: bool = False
    scored: bool = False

    @property
    def packs_pairs(self) -> bool:
        """Return whether whole pairs share sequences."""
        return self.packing and self.kind == PREFERENCE_KIND

    @property
    def documents_per_example(self) -> int:
        """Return the documents that the loss takes together, one after the other."""
        return 2 if self.kind == PREFERENCE_KIND else 1

    @property
    def joins_documents(self) -> bool:
        """Return whether several documents share a sequence, apart from each other."""
        return self.packs_pairs or (self.packing and self.kind in DOCUMENT_KINDS)


TOKENIZED_KINDS = ("text", "jsonl", "parquet", "chat", PREFERENCE_KIND)
"""The others hold token ids already."""
MASKED_KINDS = ("chat", PREFERENCE_KIND)
"""Those of whose tokens some are labels."""
DOCUMENT_KINDS = ("text", "jsonl", "parquet", "chat", "megatron")
"""Those that are made of documents, which packing keeps apart. Pairs are packed whole."""
PYTHON_STDLIB_DATASET, DRAWN_SHAPES_DATASET = "python-stdlib", "drawn-shapes"
DOCSTRING_PAIRS_DATASET = "python-docstrings"
BUILT_IN_DATASETS = {
    PYTHON_STDLIB_DATASET: "text",
    DRAWN_SHAPES_DATASET: "chat",
    DOCSTRING_PAIRS_DATASET: PREFERENCE_KIND,
}
"""Maps each built-in data set, named in place of a path, to the kind that it belongs to."""
FLASH_ATTENTION_2 = "flash_attention_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """Holds the validation data: exactly one of fraction (of the training data) and data."""

    every_steps: int
    fraction: float | None
    data: DataSection | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    """Holds the pinned parallelism; None is auto, which the compiler chooses."""

    tensor: int | None
    pipeline: int | None
    data: int | None
    zero_stage: int | None
    micro_batch_size: int | None
    activation_checkpointing: LayerCheckpointing | PartialCheckpointing | None
    schedule: Schedule | None
    offload: Offload | None
    memory_headroom: float | None
    expert: int | None
    expert_tensor: int | Literal["tensor"] | None = "tensor"
    context: int | None
    virtual_stages: int | None
    sequence_parallel: bool | None
    expert_dispatcher: ExpertDispatcher | None = None
    expert_overlap: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumeSection:
    kernels: str  # auto | hf | megatron | compiled
    mfu: float | None
    ignore_memory: bool
    expert_imbalance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmContainer:
    """Names a container. image: as enroot names it. mounts: /host/path:/path[:flags]."""

    image: str
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """Holds the options of the Slurm job, as sbatch names them.

    signal_seconds: seconds before the time limit at which the job saves and stops. gres: None is
    --gpus-per-node with the plan's number. cpus_per_node: None is all of the node with exclusive,
    else launch_files.CORES_PER_GPU per GPU. mem: None is the cluster's default.
    extra: further #SBATCH options.
    """

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: str | None = None
    requeue: bool = False
    signal_seconds: int = 300
    gres: str | None = None
    cpus_per_node: int | None = None
    exclusive: bool = True
    mem: str | None = None
    exclude: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    extra: tuple[str, ...] = ()
    container: SlurmContainer | None = None


POD_CONTAINER = "ranks"
POD_LABEL = "shardwright/run"
"""Labels the pods of a run, and nothing else in the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSection:
    """Configures the Kubernetes job. directory: the compiled folder in the pods, inside mount_path,
    where volume_claim is mounted.

    secret: holds launch.env_from's values. restarts: of a pod (job) or all pods (else), before the
    job fails. labels: of the object itself. pod_patch: merged into the ranks' pod template.
    """

    image: str
    volume_claim: str
    directory: str
    mount_path: str
    namespace: str | None
    secret: str | None
    gpu_resource: str
    restarts: int
    kind: str = "auto"  # job | jobset | trainjob | rayjob; auto in a recipe only
    labels: Mapping[str, str] = field(default_factory=dict)
    pod_patch: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """Configures the task of a service that rents or schedules the nodes. directory: the compiled
    folder on every node. gpu: as the service calls it. volumes: path on the nodes -> name. options:
    more of the task's file.
    """

    directory: str
    gpu: str | None = None
    image: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    options: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySection:
    """Limits what `run --supervise` does when a run ends early.

    retries: restarts in a row without a newer checkpoint. min_nodes: fewest nodes to plan again
    for; None is cluster.nodes. spares: hosts after those of the plan in the hostfile or in the
    Slurm job. on: causes that are restarted. skip_batches: most batches that are left out because
    their loss was not finite twice.
    """

    retries: int = 3
    min_nodes: int | None = None
    spares: int = 0
    on: tuple[FailureCause, ...] = FAILURE_CAUSES
    skip_batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """Configures the launch. hostfile, setup_script: absolute; in a plan relative to the compiled
    folder.

    Without a hostfile the hosts are named when the run starts. slurm, kubernetes, task: in a plan
    set only for that launcher. outer_store: address of the islands' store, None without islands.
    recovery: None where the recipe has none.
    """

    launcher: str  # auto, or a row of launcher_table.py
    hostfile: str | None
    master_addr: str | None  # None = auto
    master_port: int | None
    env: tuple[tuple[str, str], ...]  # names and values
    env_from: tuple[str, ...]
    setup_script: str | None
    slurm: SlurmSection | None = None
    kubernetes: KubernetesSection | None = None
    task: TaskSection | None = None
    outer_store: str | None = None
    recovery: RecoverySection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    directory: str
    every_steps: int | Literal["auto"] | None  # None = only after the last step
    keep: int | None  # None = all
    upload_to: str | None = None  # URL that fsspec opens
    in_memory: bool = False  # copies in the memory of two hosts
    in_memory_every: int | Literal["auto"] | None = "auto"  # None = no copies, in a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Holds a valid recipe. document: the input with extends and --set merged and every default
    filled in, which the compiled folder stores as its resolved recipe. forward_only: nothing is
    trained, as in the recipes that `score` derives."""

    version: int
    name: str
    target: str  # deepspeed | reference | megatron
    model: ModelSection
    cluster: ClusterSection
    training: TrainingSection
    data: DataSection | None
    validation: ValidationSection | None
    parallelism: ParallelismSection
    objective: Objective
    assume: AssumeSection
    launch: LaunchSection
    checkpoint: CheckpointSection
    tracking: TrackingSection
    lora: LoraSection | None = None  # None: every parameter is trained
    extra: JsonObject  # keys of ds_config.json, as written
    directory: str  # absolute folder of the recipe file: relative paths start here
    document: JsonObject
    source: Source
    forward_only: bool = False

    @property
    def is_own_run(self) -> bool:
        """Tell whether an estimate is of a run of this project, not of a published run of another
        one."""
        return self.assume.kernels == "auto" or self.model.kernels == "compile"

    def dataset_sections(self) -> tuple[tuple[KeyPath, DataSection], ...]:
        """Return each data set of training and validation with its key; a mixture gives its
        parts."""
        held_out = None if self.validation is None else self.validation.data
        found: list[tuple[KeyPath, DataSection]] = []
        for key, data in (("data", self.data), ("validation", held_out)):
            if data is not None and data.mixture:
                found += [((key, "mixture", n), part) for n, part in enumerate(data.mixture)]
            elif data is not None:
                found.append(((key,), data))
        return tuple(found)

    def tokenized(self) -> tuple[tuple[KeyPath, DataSection], ...]:
        """Return the data sets that need a tokenizer, with their keys."""
        return tuple(
            (key, part) for key, part in self.dataset_sections() if part.kind in TOKENIZED_KINDS
        )


def with_resolved_kernels(recipe: Recipe, kernels: Kernels) -> Recipe:
    """Set model.kernels to the resolved value. `compile` is costed as `assume.kernels:
    compiled`."""
    assumed = recipe.assume.kernels
    if assumed in ("auto", "compiled"):
        assumed = "compiled" if kernels == "compile" else "auto"
    return replace(
        recipe,
        model=replace(recipe.model, kernels=kernels),
        assume=replace(recipe.assume, kernels=assumed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    """Configures LoRA. target_modules: names of modules inside a decoder layer; None (auto): every
    linear layer of it."""

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...] | None


def weights_summary(weights: str) -> str:
    """Describe `model.weights` for a summary."""
    return "weights pretrained" if weights == "pretrained" else "weights random (from scratch)"
