"""Write a plan as arguments of Megatron's TransformerConfig and of pretrain_gpt.py."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from typing import Any

from shardwright.diagnostics import Diagnostic, refusal
from shardwright.engines.megatron.expert_exchange import cuda_connections, exchange_settings
from shardwright.engines.megatron.low_precision_recipes import low_precision_options
from shardwright.engines.megatron.megatron_capabilities import ARGUMENTS_FILE, OPTIMIZER_NAMES
from shardwright.engines.megatron.megatron_weight_mapping import MODEL_MAPPINGS, hf_config
from shardwright.plan.plan import Plan, PlanScheduler
from shardwright.recipe.learning_rate_schedules import DEFAULT_LR_END, SCHEDULES
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.utils.json_values import JsonObject

_KINDS = {"embedding": "embedding", "head": "loss"}


def stage_layers(plan: Plan) -> list[list[str]]:
    """Return pipeline_model_parallel_layout: each stage's layer kinds.

    Stage s is chunk s // pipeline of pipeline rank s % pipeline
    (megatron/core/transformer/pipeline_parallel_layer_layout.py:45).
    """
    return [[_KINDS.get(name, "decoder") for name in stage.layers] for stage in plan.stages]


def parallel_settings(plan: Plan) -> dict[str, Any]:
    """Return the layout's arguments of TransformerConfig."""
    import torch

    from shardwright.parallel.model_loading import DTYPES

    s, dtype = plan.strategy, DTYPES[plan.training.precision]
    piped = s.pipeline > 1
    return {
        "tensor_model_parallel_size": s.tensor,
        "sequence_parallel": s.sequence_parallel,
        "pipeline_model_parallel_size": s.pipeline,
        "context_parallel_size": s.context,
        "expert_model_parallel_size": s.expert,
        "expert_tensor_parallel_size": s.expert_tensor_ranks,
        "virtual_pipeline_model_parallel_size": s.virtual_stages if s.virtual_stages > 1 else None,
        "pipeline_model_parallel_layout": stage_layers(plan) if piped else None,
        "pipeline_dtype": dtype if piped else None,
        # With batched sends two ranks of an interleaved pipeline would mix up their tensors.
        "overlap_p2p_comm": s.virtual_stages > 1,
        "batch_p2p_comm": piped and s.virtual_stages == 1 and plan.device.backend == "nccl",
        # gloo sends a buffer after the sending call has returned.
        "deallocate_pipeline_outputs": piped and plan.device.backend == "nccl",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **exchange_settings(s),
        **recompute_settings(plan),
    }


def recompute_settings(plan: Plan) -> dict[str, Any]:
    """Return the recomputation arguments.

    Megatron counts the recomputed layers of each chunk from its first layer
    (megatron/core/transformer/transformer_block.py).
    """
    choice = plan.strategy.activation_checkpointing
    if choice == "none":
        return {}
    if choice == "selective" or isinstance(choice, tuple):
        modules = ["core_attn"] if choice == "selective" else list(choice)
        selective = {"recompute_granularity": "selective", "recompute_modules": modules}
        # TransformerConfig takes moe_act for grouped experts alone.
        return selective | ({"moe_grouped_gemm": True} if "moe_act" in modules else {})
    most = max(len(s.layers) for s in plan.stages)
    if isinstance(choice, PartialCheckpointing):
        most = choice.full // plan.strategy.virtual_stages
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": most,
    }


def shards_states(plan: Plan) -> bool:
    """Return whether the distributed optimizer runs.

    States in host memory need it on one data rank, too
    (megatron/training/arguments.py: --optimizer-cpu-offload takes --use-precision-aware-optimizer,
    optimizer_config.py: which takes the distributed optimizer).
    """
    s = plan.strategy
    return s.zero_stage > 0 and (s.zero_world_size > 1 or s.offload != "none")


def offload_settings(plan: Plan) -> dict[str, Any]:
    """Return OptimizerConfig's arguments that keep masters and moments in host memory.

    With a fraction of 1.0 no parameter is updated on the GPU. Under the overlap each parameter has
    an optimizer of its own, which runs while other gradients and weights are on the link.
    """
    if plan.strategy.offload == "none":
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }


# megatron_args.sh: a plan as arguments of Megatron-LM's own pretrain_gpt.py, for its users.
#
# Option names are those of the tag core_v0.19.0, megatron/training/arguments.py
# (lint/megatron_options.json has them).

_LAYER_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L"}
_WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
_NAMES = {"layernorm_epsilon": "norm-epsilon", "num_moe_experts": "num-experts"}
"""Maps a field of TransformerConfig to its option, where the two differ."""
_SWITCHES = {
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
    "multi_latent_attention": "--multi-latent-attention",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Lists the constants of Megatron's llama3 rope
(megatron/core/models/common/embeddings/rotary_pos_embedding.py:90, 0.16.1)."""

Option = tuple[str, ...]
"""Holds an option and its values."""


class MissingOption(Exception):
    """Report what of the model pretrain_gpt.py has no option for.

    The text begins with the key and its value.
    """


def arguments_file(
    plan: Plan, config: JsonObject
) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """Return megatron_args.sh, or SW2055 where the script has no option for the model."""
    if plan.is_cpu:
        return {}, ()  # the script requires a GPU
    try:
        groups = {
            "the model": [*_model_options(plan, config)],
            "the run": [*_training_options(plan)],
            "the ranks": [*_parallel_options(plan)],
        }
    except MissingOption as error:
        diagnostic = Diagnostic(
            code="SW2055",
            message=f"{ARGUMENTS_FILE} is not written: pretrain_gpt.py has no option for {error}",
            severity="warning",
            help="`shardwright run` trains the model all the same, without this file.",
        )
        return {}, (diagnostic,)
    lines = [
        (
            "# This plan for Megatron-LM's pretrain_gpt.py (tag core_v0.19.0), which reads its own "
            "data, draws its own"
        ),
        "# weights and writes its own checkpoints. `shardwright run` does not use this file.",
        f"#   source {ARGUMENTS_FILE}",
        (
            f"#   torchrun --nnodes {plan.nodes} --nproc-per-node {plan.gpus_per_node} ... "
            "pretrain_gpt.py \\"
        ),
        '#     "${MEGATRON_ARGS[@]}" --data-path ... --tokenizer-type ... --save ...',
    ]
    if connections := cuda_connections(plan.strategy):
        number, why = connections
        lines.append(f"export CUDA_DEVICE_MAX_CONNECTIONS={number}  # {why}")
    lines.append("MEGATRON_ARGS=(")
    for title, options in groups.items():
        lines += [f"  # {title}", *(f"  {shlex.join(option)}" for option in options)]
    return {ARGUMENTS_FILE: ("\n".join([*lines, ")"]) + "\n").encode()}, ()


def _model_options(plan: Plan, config: JsonObject) -> Iterator[Option]:
    whole = hf_config(config)
    family = MODEL_MAPPINGS[plan.model.model_type]
    chosen = exchange_settings(plan.strategy)  # among the ranks' options
    settings = {k: v for k, v in family.settings(whole).items() if k not in chosen}
    if family.scaled_embedding:
        raise MissingOption("an embedding scaled by the square root of the hidden size")
    length = plan.training.sequence_length
    positions = getattr(whole, "max_position_embeddings", 0) or getattr(whole, "n_positions", 0)
    yield from (
        ("--seq-length", str(length)),
        ("--max-position-embeddings", str(max(length, positions))),
    )
    vocabulary = plan.model.vocabulary_size
    yield from (("--vocab-size", str(vocabulary)), ("--make-vocab-size-divisible-by", "1"))
    groups, heads = settings.pop("num_query_groups"), settings["num_attention_heads"]
    if groups < heads:
        yield from (("--group-query-attention",), ("--num-query-groups", str(groups)))
    yield from _activation(whole, gated=settings.pop("gated_linear_unit", False))
    settings.pop("activation_func")
    if not settings.pop("add_bias_linear"):
        yield ("--disable-bias-linear",)
    for name, value in settings.items():
        if name in _SWITCHES:
            yield from [(_SWITCHES[name],)] * bool(value)
        elif value is not None:
            option = f"--{_NAMES.get(name, name.replace('_', '-'))}"
            if isinstance(value, tuple):
                yield option, ",".join(map(str, value))
            else:
                yield (
                    option,
                    repr(value) if isinstance(value, float) else str(value).replace(" ", ""),
                )
    yield from (
        [("--position-embedding-type", "learned_absolute")]
        if family.learned_positions
        else _rope(whole)
    )
    if not plan.model.tied:
        yield ("--untie-embeddings-and-output-weights",)
    yield from (("--attention-dropout", "0"), ("--hidden-dropout", "0"))
    if (deviation := getattr(whole, "initializer_range", None)) is not None:
        yield "--init-method-std", repr(float(deviation))


def _activation(config: Any, *, gated: bool) -> Iterator[Option]:
    """Yield the activation's options.

    Megatron's fused GELU is the tanh one, the other is not
    (megatron/core/fusions/fused_bias_gelu.py).
    """
    name = getattr(config, "hidden_act", None) or config.activation_function
    slope = getattr(config, "swiglu_alpha", None)
    if gated and slope is not None:
        if slope != 1.702:  # megatron/core/fusions/fused_bias_geglu.py, quick_gelu
            raise MissingOption(f"swiglu_alpha {slope}")
        yield ("--quick-geglu",)
    elif gated and name == "silu":
        yield ("--swiglu",)
    elif not gated and name == "relu2":
        yield ("--squared-relu",)
    elif not gated and name == "gelu":
        yield ("--no-bias-gelu-fusion",)
    elif gated or name not in ("gelu_new", "gelu_pytorch_tanh"):
        raise MissingOption(f"the {'gated ' * gated}activation {name!r}")


def _rope(config: Any) -> Iterator[Option]:
    rope = getattr(config, "rope_parameters", None) or {}
    kind, base = rope.get("rope_type", "default"), float(rope.get("rope_theta", 10000.0))
    if not base.is_integer():
        raise MissingOption(f"rope_theta {base}: --rotary-base takes integers")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise MissingOption(
            f"partial_rotary_factor {rope['partial_rotary_factor']}, which no verified model type "
            "has"
        )
    yield from (("--position-embedding-type", "rope"), ("--rotary-base", str(int(base))))
    if kind == "llama3":
        for key, value in _LLAMA_3.items():
            if rope.get(key) != value:
                raise MissingOption(
                    f"{key} {rope.get(key)} of a llama3 rope (its code has the constant {value})"
                )
        yield from (("--use-rope-scaling",), ("--rope-scaling-factor", repr(float(rope["factor"]))))
    elif kind != "default":
        raise MissingOption(f"rope_type {kind} with Hugging Face's frequencies")


def _training_options(plan: Plan) -> Iterator[Option]:
    training, optimizer, scheduler = plan.training, plan.optimizer, plan.scheduler
    s = plan.strategy
    yield from (
        ("--micro-batch-size", str(s.micro_batch_size)),
        ("--global-batch-size", str(training.global_batch_size)),
    )
    if training.steps:  # otherwise they follow from the prepared data
        yield from (
            ("--train-iters", str(training.steps)),
            ("--lr-decay-iters", str(training.steps)),
        )
        yield "--lr-warmup-iters", str(scheduler.warmup_steps)
    yield "--lr", repr(optimizer.lr)
    yield from schedule_options(scheduler)
    yield from (
        ("--optimizer", OPTIMIZER_NAMES[optimizer.name]),
        ("--weight-decay", repr(optimizer.weight_decay)),
    )
    yield from _muon_options(plan)
    yield from (
        ("--adam-beta1", repr(optimizer.betas[0])),
        ("--adam-beta2", repr(optimizer.betas[1])),
    )
    yield from (
        ("--adam-eps", repr(optimizer.eps)),
        ("--clip-grad", repr(training.gradient_clipping)),
    )
    yield from (("--seed", str(training.seed)), ("--calculate-per-token-loss",))
    if training.precision == "bf16":
        yield ("--bf16",)
        if training.gradient_accumulation_dtype == "bf16":
            yield ("--grad-reduce-in-bf16",)
    on_gpu = shards_states(plan) and s.offload == "none"
    yield from low_precision_options(plan, gathers_parameters=on_gpu)


def _muon_options(plan: Plan) -> Iterator[Option]:
    """Yield Muon's options, as megatron_muon.muon_settings has them."""
    optimizer = plan.optimizer
    if not plan.muon:
        return
    if optimizer.adamw_lr != optimizer.lr:
        raise MissingOption(
            f"training.optimizer.adamw_lr {optimizer.adamw_lr}, which differs from lr "
            f"{optimizer.lr}"
        )
    yield from (
        ("--muon-momentum", repr(optimizer.momentum)),
        ("--muon-nesterov",),
        ("--muon-num-ns-steps", str(optimizer.ns_steps)),
        ("--muon-coefficient-type", "simple"),
        ("--muon-scale-mode", "shape_scaling"),
        ("--muon-tp-mode", "duplicated"),
    )


def schedule_options(s: PlanScheduler) -> Iterator[Option]:
    """Yield the options of the schedule's curve (megatron/core/optimizer_param_scheduler.py)."""
    row = SCHEDULES[s.name]
    decay = s.decay_type or row.decay_type
    others = {
        "name": (s.name, row.megatron is not None),
        "num_cycles": (
            s.num_cycles,
            s.num_cycles in (None, 0.5) or (row.megatron == "WSD" and decay != "cosine"),
        ),
        "power": (s.power, s.power in (None, 1.0)),
        "timescale": (
            s.timescale or s.warmup_steps or "without a warm-up",
            s.name != "inverse_sqrt" or (s.timescale in (None, s.warmup_steps) and s.warmup_steps),
        ),
        "warmup_lr_rate": (s.warmup_lr_rate, s.warmup_lr_rate is None),
        "warmup_type": (s.warmup_type, s.warmup_type in (None, "linear")),
    }
    for key, (value, has_option) in others.items():
        if not has_option:
            raise MissingOption(f"scheduler.{key} {value}")
    least = s.min_lr
    if s.name == "polynomial":
        least = DEFAULT_LR_END if s.lr_end is None else s.lr_end
    yield from (("--min-lr", repr(least)), ("--lr-decay-style", str(row.megatron)))
    if row.starts_at_min and s.min_lr:
        yield "--lr-warmup-init", repr(s.min_lr)
    if row.megatron == "WSD":
        yield from (
            ("--lr-wsd-decay-style", _WSD_DECAYS[decay]),
            ("--lr-wsd-decay-iters", str(s.decay_steps)),
        )


def _parallel_options(plan: Plan) -> Iterator[Option]:
    s = plan.strategy
    yield "--tensor-model-parallel-size", str(s.tensor)
    if s.sequence_parallel:
        yield ("--sequence-parallel",)
    yield "--pipeline-model-parallel-size", str(s.pipeline)
    if s.context > 1:
        yield "--context-parallel-size", str(s.context)
    if s.expert > 1:
        yield "--expert-model-parallel-size", str(s.expert)
    if s.expert_tensor_ranks != s.tensor:
        yield "--expert-tensor-parallel-size", str(s.expert_tensor_ranks)
    if s.pipeline > 1:
        yield "--pipeline-model-parallel-layout", pipeline_layout_text(plan)
    if shards_states(plan):
        yield ("--use-distributed-optimizer",)
    settings = recompute_settings(plan) | exchange_settings(s) | _host_optimizer_options(plan)
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [str(value)]
        yield (option,) if value is True else (option, *values)


def _host_optimizer_options(plan: Plan) -> dict[str, Any]:
    """Return the script's names and values of `offload_settings`.

    The parser takes them with --use-precision-aware-optimizer alone.
    """
    settings = offload_settings(plan)
    if settings and plan.training.precision == "fp32":
        raise MissingOption(
            "offload optimizer in fp32: HybridDeviceOptimizer does not take fp32 weights"
        )
    return settings | ({"use_precision_aware_optimizer": True} if settings else {})


def pipeline_layout_text(plan: Plan) -> str:
    """Return pipeline_model_parallel_layout in its parser's syntax: Et*3|t*4|t*4|t*3,L."""
    stages = []
    for kinds in stage_layers(plan):
        runs = [(_LAYER_LETTERS[kind], len(list(same))) for kind, same in itertools.groupby(kinds)]
        stages.append(
            ",".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)
        )
    return "|".join(stages)


# Megatron-Core's Lowering (engine_definition.Lowering).


def zero_settings(plan: Plan) -> JsonObject:
    """Return the plan's `zero`.

    distributed_optimizer: Megatron's name for sharded optimizer states
    """
    return {"stage": plan.strategy.zero_stage, "distributed_optimizer": shards_states(plan)}


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """Return megatron_args.sh, for users of Megatron's own script; train.py reads plan.json.

    Raises Refusal where the model would compute something else: SW2051 to SW2054.
    """
    if plan.model.dropout > 0:
        raise refusal(
            "SW2054",
            f"the model's dropout {plan.model.dropout} does not run under Megatron-Core",
            "Set the dropout probabilities to 0 in model.config, or write `target: deepspeed`.",
        )
    from shardwright.engines.megatron.megatron_equivalence import check_megatron_equivalence

    check_megatron_equivalence(plan, config)
    return arguments_file(plan, config)
