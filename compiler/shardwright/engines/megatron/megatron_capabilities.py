"""Define Megatron-Core's row of the engine table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_definition import Engine, EngineTraits
from shardwright.engines.megatron.expert_exchange import RULES as EXCHANGE_RULES
from shardwright.engines.megatron.low_precision_recipes import (
    LOW_PRECISION_RECIPES,
    keeps_whole_layers_at_the_ends,
)
from shardwright.engines.megatron.low_precision_recipes import (
    REFUSAL_REASON as LOW_PRECISION_REFUSAL,
)
from shardwright.engines.megatron.megatron_weight_mapping import MODEL_MAPPINGS
from shardwright.engines.megatron.recompute_modules import recompute_obstacle
from shardwright.engines.megatron.transformer_engine_layers import (
    TRANSFORMER_ENGINE_AXES,
    gpu_layers_text,
    low_precision_unavailable,
    transformer_engine_choice,
    transformer_engine_unavailable,
)
from shardwright.layout.fused_weights import FusedOrder, joined_matrices
from shardwright.layout.layout import Candidate, Rule, rule
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.tensor_parallel_map import split_parameter
from shardwright.models.expert_modules import expert_modules, experts_per_layer
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonScalar
from shardwright.utils.private_names import Purpose

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

ARGUMENTS_FILE = "megatron_args.sh"

# Every key of a recipe under `target: megatron`: whether it runs, or why not. The rules below cover
# keys that a search chooses.


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedKey:
    """Describe which values of a recipe's key run.

    value: returns the recipe's value, _GIVEN for a section or a list
    allowed: the values that run
    why: why the others do not run
    """

    value: Callable[[Recipe], JsonScalar]
    allowed: tuple[JsonScalar, ...]
    why: str


_GIVEN = "given"


def _given(section: object) -> str | None:
    return _GIVEN if section else None


OPTIMIZER_NAMES: Mapping[str, str] = {"adamw": "adam", "muon": "muon"}
"""Maps a recipe's optimizer to Megatron's `--optimizer`."""

REFUSED_KEYS: Mapping[str, RefusedKey] = {
    "model.loss": RefusedKey(
        value=lambda r: r.model.loss,
        allowed=("auto", "full"),
        why="Megatron-Core's output layer computes all logits of a micro-batch at once",
    ),
    "model.kernels": RefusedKey(
        value=lambda r: r.model.kernels,
        allowed=("hf", "auto"),
        why="torch.compile is implemented for Hugging Face's layers, not for Megatron-Core's",
    ),
    "model.freeze": RefusedKey(
        value=lambda r: _given(r.model.freeze),
        allowed=(None,),
        why="frozen parameters are not implemented for Megatron-Core's modules",
    ),
    "model.router_aux_loss": RefusedKey(
        value=lambda r: r.model.router_aux_loss,
        allowed=(None,),
        why="the router balance loss is implemented only for Hugging Face's routers",
    ),
    "model.attention": RefusedKey(
        value=lambda r: r.model.attention,
        allowed=("auto", "eager", "sdpa"),
        why="Megatron-Core's attention is torch's scaled_dot_product_attention or Transformer "
        "Engine's",
    ),
    "training.outer": RefusedKey(
        value=lambda r: _given(r.training.outer),
        allowed=(None,),
        why="DiLoCo islands are not tested with Megatron-Core",
    ),
    "lora": RefusedKey(
        value=lambda r: _given(r.lora),
        allowed=(None,),
        why="adapters are implemented only for Hugging Face's modules",
    ),
    "extra": RefusedKey(
        value=lambda r: _given(r.extra),
        allowed=(None,),
        why="extra holds keys of DeepSpeed's ds_config.json",
    ),
}
"""Maps a recipe's key, by its path, to the values that run."""

SUPPORTED_KEYS: tuple[str, ...] = (
    *("version", "name", "extends", "target", "objective", "cluster", "data", "validation"),
    *("launch", "checkpoint", "tracking", "assume"),
    *("model.source", "model.config", "model.revision", "model.weights", "model.trust_remote_code"),
    "model.transformer_engine",
    *(
        "training.sequence_length",
        "training.global_batch_size",
        "training.steps",
        "training.tokens",
    ),
    *("training.epochs", "training.scheduler", "training.gradient_clipping"),
    *("training.stop_after_nonfinite", "training.seed", "training.days_at_most"),
    *("training.gradient_accumulation_dtype", "training.low_precision_keep"),
    *(
        "parallelism.tensor",
        "parallelism.pipeline",
        "parallelism.data",
        "parallelism.micro_batch_size",
    ),
    *("parallelism.activation_checkpointing", "parallelism.memory_headroom"),
)
"""Lists keys and sections that run as under any engine.

The rules below cover the other keys of `parallelism`; SW1909 covers axes that this engine lacks
and values that no engine runs.
"""


def check_recipe_keys(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return SW1922 for every key that does not run."""
    errors = []
    for name, key in REFUSED_KEYS.items():
        value = key.value(recipe)
        if value in key.allowed:
            continue
        allowed = tuple(str(each) for each in key.allowed if each is not None)
        errors.append(
            found(
                "SW1922",
                name,
                f"{name if value == _GIVEN else f'{name}: {value}'} does not run under target: "
                f"megatron: {key.why}",
                f"{'Change' if allowed else 'Remove'} {name}, or write `target: deepspeed`.",
                allowed,
            )
        )
    return tuple(errors)


# Layouts that Megatron-Core, or this version's use of it, does not run. Lines are of megatron-core
# 0.16.1. Its argument parser accepts some of these; they fail in the first step, or train wrong.


def zero_stage_above_1(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's distributed optimizer shards only the optimizer's states, as ZeRO stage 1."""
    stage = x.strategy.zero_stage
    if stage <= 1:
        return None
    return found(
        "SW3151",
        "parallelism.zero_stage",
        (
            f"zero_stage {stage} does not run under Megatron-Core, whose distributed optimizer "
            "shards only the optimizer's states"
        ),
        "Use zero_stage: 1, or `target: deepspeed`.",
        (0, 1),
    )


def key_value_copies(x: Candidate) -> Diagnostic | None:
    """Each tensor rank must hold the same number of key/value heads, none of them split. With fewer
    heads than ranks Megatron-Core splits a head (megatron/core/transformer/attention.py:289), and
    checkpoints, which store parameters by name, cannot hold a part of a head."""
    heads, tensor = x.graph.key_value_heads, x.strategy.tensor
    if heads % tensor == 0:
        return None
    return found(
        "SW3152",
        "parallelism.tensor",
        (
            f"tensor {tensor} does not divide the model's {heads} key/value heads, but "
            "Megatron-Core gives each tensor rank equally many"
        ),
        "Use a tensor degree that divides the number of heads, or `target: deepspeed`, whose "
        "tensor ranks hold copies of heads.",
        tuple(n for n in range(1, heads + 1) if heads % n == 0),
    )


def sequence_without_tensor(x: Candidate) -> Diagnostic | None:
    """With sequence parallelism each tensor rank holds an equal part of the sequence, so tensor
    must be above 1 and divide the sequence (model_parallel_config.py, __post_init__)."""
    s = x.strategy
    length = x.recipe.training.sequence_length // s.context
    if not s.sequence_parallel or (s.tensor > 1 and length % s.tensor == 0):
        return None
    whose = "the sequence's" if s.context == 1 else "a context rank's"
    why = (
        "tensor is 1"
        if s.tensor == 1
        else f"tensor {s.tensor} does not divide {whose} {length} tokens"
    )
    return found(
        "SW3153",
        "parallelism.sequence_parallel",
        f"sequence_parallel shards the sequence over the tensor ranks, but {why}",
        f"Write `sequence_parallel: false`, or a tensor degree above 1 that divides {length}.",
    )


def schedule_not_1f1b(x: Candidate) -> Diagnostic | None:
    """Megatron-Core has the 1F1B schedule, but not DualPipeV."""
    if x.strategy.schedule == "1f1b":
        return None
    return found(
        "SW3154",
        "parallelism.schedule",
        f"schedule {x.strategy.schedule} does not run under Megatron-Core, which has only 1F1B",
        "Use schedule: 1f1b, or `target: deepspeed`.",
        ("1f1b",),
    )


def offloaded_parameters(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's HybridDeviceOptimizer keeps fp32 master weights and moments in host memory,
    but not the parameters."""
    if x.strategy.offload != "parameters":
        return None
    return found(
        "SW3155",
        "parallelism.offload",
        "offload parameters does not run under Megatron-Core, which offloads only the optimizer's "
        "states to host memory",
        "Use offload: optimizer, or `target: deepspeed`.",
        ("none", "optimizer"),
    )


def offload_without_distributed_optimizer(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's optimizer in host memory needs the distributed optimizer, which is ZeRO-1.

    HybridDeviceOptimizer runs behind --use-precision-aware-optimizer, which takes the distributed
    optimizer (megatron/core/optimizer/optimizer_config.py:380). Without it the first update ends
    with a KeyError: Float16OptimizerWithFloat16Params puts masters on the GPU in the place of the
    parameters that it knows (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py:339).
    """
    s = x.strategy
    if s.offload == "none" or s.zero_stage > 0:
        return None
    return found(
        "SW3177",
        "parallelism.zero_stage",
        f"offload {s.offload} with zero_stage 0 does not run under Megatron-Core, whose optimizer "
        "in host memory needs the distributed optimizer (zero_stage 1)",
        "Use zero_stage: 1, which runs with data: 1 too, or offload: none.",
        (1,),
    )


def experts_without_sequence(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's layer of experts raises an error with tensor parallelism but without sequence
    parallelism (megatron/core/transformer/moe/moe_layer.py)."""
    s = x.strategy
    if s.tensor == 1 or s.sequence_parallel or experts_per_layer(x.graph) < 2:
        return None
    return found(
        "SW3156",
        "parallelism.sequence_parallel",
        f"Megatron-Core runs experts with tensor {s.tensor} only with sequence parallelism, which "
        "is off",
        "Write `sequence_parallel: true`, or `tensor: 1`.",
    )


def virtual_stages(x: Candidate) -> Diagnostic | None:
    """Virtual stages need a pipeline. Megatron-Core's interleaved schedule takes micro-batches in
    groups of the pipeline degree and fails on a remainder at the first step
    (megatron/core/pipeline_parallel/schedules.py). Each virtual stage must hold at least one layer,
    and N of `{full: N}` must be a multiple of virtual_stages."""
    # Megatron-Core allows stages without a layer.
    s, layers = x.strategy, len(x.graph.layers)
    if s.virtual_stages == 1:
        return None
    choice, virtual = s.activation_checkpointing, s.virtual_stages
    if s.pipeline == 1:
        why, fix = "needs a pipeline, but pipeline is 1", "Use pipeline: 2 or more"
    elif s.gradient_accumulation_steps % s.pipeline:
        why = (
            f"with pipeline {s.pipeline} needs a multiple of {s.pipeline} micro-batches a step, "
            f"but there are {s.gradient_accumulation_steps}"
        )
        fix = "Change training.global_batch_size, micro_batch_size or data"
    elif layers < s.total_stages:
        why = (
            f"with pipeline {s.pipeline} makes {s.total_stages} stages, but the model has only "
            f"{layers} layers, embedding and head included"
        )
        fix = "Use fewer pipeline ranks"
    elif isinstance(choice, PartialCheckpointing) and choice.full % virtual:
        why = (
            f"does not divide the {choice.full} layers that activation_checkpointing: {choice} "
            "recomputes"
        )
        fix = f"Use a multiple of {virtual} layers"
    else:
        return None
    return found(
        "SW3157",
        "parallelism.virtual_stages",
        f"virtual_stages {virtual} {why}",
        f"{fix}, or write `virtual_stages: 1`.",
        (1,),
    )


def context_divides_sequence(x: Candidate) -> Diagnostic | None:
    """Each context rank has one chunk from the front of a sequence and one from the back, so
    sequence_length must be a multiple of 2 x context (megatron/training/arguments.py,
    validate_args: seq_length % (context_parallel_size * 2))."""
    c, length = x.strategy.context, x.recipe.training.sequence_length
    if c == 1 or length % (2 * c) == 0:
        return None
    return found(
        "SW3164",
        "parallelism.context",
        (
            f"Megatron-Core splits a sequence into {2 * c} equal chunks for context {c}, but "
            f"{length} tokens are not a multiple of {2 * c}"
        ),
        "Use a context degree whose double divides the sequence length, or change "
        "training.sequence_length.",
        tuple(n for n in range(1, length // 2 + 1) if length % (2 * n) == 0)[:8],
    )


def expert_groups(x: Candidate) -> Diagnostic | None:
    """Only a model with experts can have expert ranks. Megatron-Core's expert groups cover all
    ranks of a stage, so expert x expert_tensor divides tensor x context x data
    (megatron/core/parallel_state.py:882)."""
    s = x.strategy
    ranks, apart = s.tensor * s.zero_world_size, s.expert_tensor_ranks
    if s.expert > 1 and not expert_modules(x.graph):
        return found(
            "SW3165",
            "parallelism.expert",
            f"expert {s.expert} needs a mixture of experts, but the model has no experts",
            "Use expert: 1.",
            (1,),
        )
    if ranks % (s.expert * apart) == 0:
        return None
    return found(
        "SW3165",
        "parallelism.expert",
        f"expert {s.expert} x expert_tensor {apart} does not divide the {ranks} ranks of tensor "
        f"{s.tensor} x context {s.context} x data {s.data}",
        "Use degrees whose product divides the number of ranks: Megatron-Core's expert groups "
        "cover all ranks of a stage.",
        tuple(n for n in range(1, ranks // apart + 1) if ranks % (n * apart) == 0)[:8],
    )


def expert_biases(x: Candidate) -> Diagnostic | None:
    """Megatron-Core supports experts with biases only if no expert is split over tensor ranks
    (megatron/core/transformer/transformer_config.py: "Bias in Moe is only supported when expert
    tensor parallelism is 1")."""
    s = x.strategy
    if s.expert_tensor_ranks == 1 or not _experts_have_biases(x.graph):
        return None
    return found(
        "SW3166",
        "parallelism.expert_tensor",
        (
            f"expert_tensor: {s.expert_tensor} shards experts that have biases over "
            f"{s.expert_tensor_ranks} tensor ranks, which Megatron-Core does not support"
        ),
        "Write `expert_tensor: 1`, which leaves the experts unsharded on each tensor rank.",
        (1,),
    )


@functools.lru_cache(maxsize=64)
def _experts_have_biases(graph: ModelGraph) -> bool:
    modules = expert_modules(graph)
    names = {p.name for layer in graph.layers for p in layer.parameters if len(p.shape) == 2}
    return any(name.rpartition(".")[0] in modules for name in names)


def expert_tensor(x: Candidate) -> Diagnostic | None:
    """Checkpoints store parameters by name. They cannot hold experts that are split over fewer
    tensor ranks than the other weights, unless the experts are not split at all."""
    s = x.strategy
    if s.expert_tensor_ranks == s.tensor or (s.expert_tensor == 1 and expert_modules(x.graph)):
        return None
    if not expert_modules(x.graph):
        return found(
            "SW3167",
            "parallelism.expert_tensor",
            f"expert_tensor {s.expert_tensor} needs a mixture of experts, but the model has no "
            "experts",
            "Write `expert_tensor: tensor`, the default.",
            ("tensor",),
        )
    return found(
        "SW3167",
        "parallelism.expert_tensor",
        f"expert_tensor {s.expert_tensor} does not run with tensor {s.tensor}: experts can be "
        f"sharded over all {s.tensor} tensor ranks, or over none",
        "Write `expert_tensor: tensor` for all tensor ranks, or `expert_tensor: 1` for none.",
        ("tensor", 1),
    )


def fused_weights_cut_otherwise(x: Candidate) -> Diagnostic | None:
    """A fused weight stores several matrices. A tensor rank of Megatron-Core holds the query, key
    and value of its own heads, or the gate and up of its own features. In a plan that follows
    transformers' tensor-parallel plan, as for Phi-3, a rank holds consecutive rows of the weight.
    """
    tensor = x.strategy.tensor
    name = _weight_cut_otherwise(x.graph, tensor) if tensor > 1 else None
    if name is None:
        return None
    return found(
        "SW3176",
        "parallelism.tensor",
        f"tensor {tensor} does not run under Megatron-Core for {x.graph.model_type!r}: "
        f"Megatron-Core's tensor ranks hold other rows of {name} than the plan's",
        "Write `tensor: 1`, or `target: deepspeed`.",
        (1,),
    )


@functools.lru_cache(maxsize=64)
def _weight_cut_otherwise(graph: ModelGraph, tensor: int) -> str | None:
    for p in (p for layer in graph.layers[1:-1] for p in layer.parameters if len(p.shape) == 2):
        joined, split = joined_matrices(graph, p), split_parameter(graph, p, tensor)
        if joined is None or joined.order != FusedOrder() or len(joined.rows) < 2:
            continue
        if split.dimension is not None and split.blocks != joined.rows:
            return p.name
    return None


def muon_with_sharded_states(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's distributed optimizer shards only AdamW's states: it would split the matrices
    that Muon needs whole. Megatron-Core's layer-wise optimizer, which gives each rank whole
    matrices (megatron/core/optimizer/layer_wise_optimizer.py), is not tested with this project."""
    s = x.strategy
    if not OPTIMIZERS[x.recipe.training.optimizer.name].matrix_moments:
        return None
    if s.zero_stage == 0 or s.zero_world_size == 1:
        return None
    return found(
        "SW3237",
        "parallelism.zero_stage",
        f"muon does not run under Megatron-Core with zero_stage {s.zero_stage} over "
        f"{s.zero_world_size} data and context ranks: the distributed optimizer shards matrices, "
        "which Muon needs unsharded",
        "Use zero_stage: 0, or `target: deepspeed`.",
        (0,),
    )


def muon_of_transposed_experts(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's Muon takes weights that are stored as (out, in), with joined matrices one
    after another. Experts stored as (in, out) have interleaved columns of gate and up."""
    family = MODEL_MAPPINGS.get(x.graph.model_type)
    has_muon = OPTIMIZERS[x.recipe.training.optimizer.name].matrix_moments
    if not has_muon or family is None or not family.has_transposed_experts:
        return None
    return found(
        "SW3238",
        "training.optimizer.name",
        f"muon does not run under Megatron-Core for {x.graph.model_type!r}: Megatron-Core's Muon "
        "needs weights stored as (out, in), but the experts are stored as (in, out)",
        "Write `target: deepspeed`, or `name: adamw` in training.optimizer.",
        ("adamw",),
    )


def not_tested_on_gpus(x: Candidate) -> Diagnostic | None:
    """Training under `target: megatron` was compared with single-process runs only on CPU ranks,
    not on GPUs."""
    if x.cluster.gpu.is_cpu:
        return None
    return found(
        "SW3168",
        "target",
        "target: megatron is not tested on GPUs, only on CPU ranks",
        f"{gpu_layers_text(x)} Compare the first losses with those of `target: deepspeed`, which "
        "starts from the same weights and data.",
        severity="warning",
    )


RULES: dict[str, Rule] = {
    "SW3151": rule(zero_stage_above_1, "zero_stage"),
    "SW3152": rule(key_value_copies, "tensor"),
    "SW3153": rule(sequence_without_tensor, "sequence_parallel", "tensor", "context"),
    "SW3154": rule(schedule_not_1f1b, "schedule"),
    "SW3155": rule(offloaded_parameters, "offload"),
    "SW3156": rule(experts_without_sequence, "sequence_parallel", "tensor"),
    "SW3157": rule(
        virtual_stages,
        "virtual_stages",
        "pipeline",
        "gradient_accumulation_steps",
        "activation_checkpointing",
    ),
    "SW3164": rule(context_divides_sequence, "context"),
    "SW3165": rule(expert_groups, "expert", "expert_tensor", "tensor", "data", "context"),
    "SW3166": rule(expert_biases, "expert_tensor", "tensor"),
    "SW3167": rule(expert_tensor, "expert_tensor", "tensor"),
    "SW3168": rule(not_tested_on_gpus, *TRANSFORMER_ENGINE_AXES),
    "SW3169": rule(transformer_engine_unavailable, *TRANSFORMER_ENGINE_AXES),
    **EXCHANGE_RULES,
    "SW3176": rule(fused_weights_cut_otherwise, "tensor"),
    "SW3178": rule(low_precision_unavailable, *TRANSFORMER_ENGINE_AXES),
    "SW3179": rule(keeps_whole_layers_at_the_ends),
    "SW3237": rule(muon_with_sharded_states, "zero_stage", "data", "context"),
    "SW3238": rule(muon_of_transposed_experts),
    "SW3177": rule(offload_without_distributed_optimizer, "offload", "zero_stage"),
}
HF_MODULE_RULES = frozenset({"SW3141", "SW3142", "SW3143", "SW3145", "SW3147"})
"""Lists rules about this project's context and expert modules, which this engine does without."""


def _unsupported_reason(graph: ModelGraph) -> str:
    if graph.task_traits.has_images:
        return "does not train vision-language models"
    if graph.model_type not in MODEL_MAPPINGS:
        return f"does not support the model type {graph.model_type!r}"
    return "does not run dropout" if graph.max_dropout > 0 else ""


def _private_names(plan: Plan) -> tuple[Purpose, ...]:
    needed: tuple[Purpose, ...] = ("every run under Megatron-Core",)
    return (*needed, "Megatron-Core on a CPU") if plan.is_cpu else needed


MEGATRON = Engine(
    name="megatron",
    title="Megatron-LM",
    precisions=("bf16", "fp32"),
    optimizers=OPTIMIZER_NAMES,
    low_precision={name: row.name for name, row in LOW_PRECISION_RECIPES.items()},
    refusal_reasons={
        "training.low_precision": LOW_PRECISION_REFUSAL,
        "training.precision": (
            "fp16 needs a loss scale, which checkpoints under Megatron-Core do not store"
        ),
        "training.optimizer.name": "only AdamW and Muon are implemented under Megatron-Core",
        "training.objective.name": "only next-token prediction is implemented under Megatron-Core",
        "model.task": "only causal language models are implemented under Megatron-Core",
    },
    runtime="shardwright.engines.megatron.megatron_runtime",
    lowering="shardwright.engines.megatron.megatron_arguments",
    program="deepspeed",  # its launcher starts the ranks
    packages={"megatron-core": ">=0.16.1,<0.20,!=0.17.*,!=0.18.*", "deepspeed": ">=0.19.8,<0.20"},
    private_names=_private_names,
    extra="megatron",
    artifacts=(ARGUMENTS_FILE,),
    traits=EngineTraits(
        selective_recomputes_projections=False,  # arXiv 2205.05198
        fuses_accumulation=True,
        tensor_parallel_launch_cost="hidden",
        bidirectional_p2p=True,
        saved_stage_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="megatron",
        zero_1_overlaps=True,
        zero3_gathers_flat_layers=False,
        chunked_loss=False,
        hpz=False,
        context_gathers_kv=True,
        # Transformer Engine's GroupedLinear; its linears save what they have cast.
        low_precision_experts=True,
        low_precision_inputs_saved=True,
        overlaps_host_update=True,
        repeats_orthogonalization=True,
    ),
    rules=RULES,
    waived_rules=HF_MODULE_RULES,
    key_errors=check_recipe_keys,
    axes=frozenset(
        {
            *("context", "expert", "expert_tensor", "expert_dispatcher", "expert_overlap"),
            *("virtual_stages", "sequence_parallel"),
        }
    ),
    types=frozenset(MODEL_MAPPINGS),
    pads_vocabulary=True,
    tested_on_gpus=False,
    transformer_engine=transformer_engine_choice,
    recompute_obstacle=recompute_obstacle,
    unsupported_reason=_unsupported_reason,
)
