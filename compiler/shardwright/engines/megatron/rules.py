"""Layouts that Megatron-Core, or this version's use of it, does not run. Lines are of megatron-core 0.16.1.

Its argument parser lets some of these through, and the first step, or nothing at all, refuses them.
"""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.ir.words import PartialCheckpointing
from shardwright.layout.experts import experts_of
from shardwright.layout.rule import Candidate, Rule, rule


def zero_2_and_3(x: Candidate) -> Diagnostic | None:
    """Its distributed optimizer shares out the optimizer's states; gradients stay whole."""
    stage = x.strategy.zero_stage
    if stage <= 1:
        return None
    return found(
        "SW3151",
        "parallelism.zero_stage",
        f"zero_stage {stage} under target: megatron: its distributed optimizer shares out the optimizer's states alone",
        "Use zero_stage: 1, or `target: deepspeed`.",
        (0, 1),
    )


def key_value_copies(x: Candidate) -> Diagnostic | None:
    """Megatron cuts a head where there are more tensor ranks than key/value heads
    (megatron/core/transformer/attention.py:289), which checkpoints by name have no word for."""
    heads, tensor = x.graph.key_value_heads, x.strategy.tensor
    if heads % tensor == 0:
        return None
    return found(
        "SW3152",
        "parallelism.tensor",
        f"tensor {tensor} under target: megatron: the model has {heads} key/value heads, and each rank needs its own",
        "Use a tensor degree that divides them, or `target: deepspeed`, whose ranks hold copies.",
        tuple(n for n in range(1, heads + 1) if heads % n == 0),
    )


def sequence_without_tensor(x: Candidate) -> Diagnostic | None:
    """It cuts the sequence over the tensor ranks (model_parallel_config.py, __post_init__)."""
    s, length = x.strategy, x.recipe.training.sequence_length
    if not s.sequence_parallel or (s.tensor > 1 and length % s.tensor == 0):
        return None
    why = "there are no tensor ranks" if s.tensor == 1 else f"{length} tokens do not divide over {s.tensor} ranks"
    return found(
        "SW3153",
        "parallelism.sequence_parallel",
        f"sequence_parallel cuts the sequence over the tensor ranks: {why}",
        "Write `sequence_parallel: false`, or a tensor degree above 1 that divides the sequence.",
    )


def other_schedules(x: Candidate) -> Diagnostic | None:
    if x.strategy.schedule == "1f1b":
        return None
    return found(
        "SW3154",
        "parallelism.schedule",
        f"schedule {x.strategy.schedule} is DeepSpeed's; Megatron-Core has 1F1B",
        "Use schedule: 1f1b, or `target: deepspeed`.",
        ("1f1b",),
    )


def offload(x: Candidate) -> Diagnostic | None:
    if x.strategy.offload == "none":
        return None
    return found(
        "SW3155",
        "parallelism.offload",
        f"offload {x.strategy.offload} does not run under target: megatron",
        "Use offload: none, or `target: deepspeed`.",
        ("none",),
    )


def experts_without_sequence(x: Candidate) -> Diagnostic | None:
    """The configuration warns, the layer raises (megatron/core/transformer/moe/moe_layer.py)."""
    s = x.strategy
    if s.tensor == 1 or s.sequence_parallel or experts_of(x.graph) < 2:
        return None
    return found(
        "SW3156",
        "parallelism.sequence_parallel",
        f"experts over tensor {s.tensor} want the sequence shared out too under target: megatron",
        "Write `sequence_parallel: true`, or `tensor: 1`.",
    )


def virtual_stages(x: Candidate) -> Diagnostic | None:
    """Its interleaved schedule goes round the ranks in groups of as many micro-batches, and refuses a rest at the first
    step (megatron/core/pipeline_parallel/schedules.py); parts without a layer would be legal there, not here."""
    s, layers = x.strategy, len(x.graph.layers)
    if s.virtual_stages == 1:
        return None
    choice = s.activation_checkpointing
    if s.pipeline == 1:
        why = "there is no pipeline"
    elif s.gradient_accumulation_steps % s.pipeline:
        why = f"{s.gradient_accumulation_steps} micro-batches are no multiple of pipeline {s.pipeline}"
    elif layers < s.parts:
        why = f"{s.parts} parts, and the model has {layers} layers to put on them, embedding and head counted"
    elif isinstance(choice, PartialCheckpointing) and choice.full % s.virtual_stages:
        why = f"activation_checkpointing {choice} does not divide over them"
    else:
        return None
    return found(
        "SW3157",
        "parallelism.virtual_stages",
        f"virtual_stages {s.virtual_stages}: {why}",
        "Change that, or write `virtual_stages: 1`.",
        (1,),
    )


RULES: dict[str, Rule] = {
    "SW3151": rule(zero_2_and_3, "zero_stage"),
    "SW3152": rule(key_value_copies, "tensor"),
    "SW3153": rule(sequence_without_tensor, "sequence_parallel", "tensor"),
    "SW3154": rule(other_schedules, "schedule"),
    "SW3155": rule(offload, "offload"),
    "SW3156": rule(experts_without_sequence, "sequence_parallel", "tensor"),
    "SW3157": rule(
        virtual_stages, "virtual_stages", "pipeline", "gradient_accumulation_steps", "activation_checkpointing"
    ),
}
