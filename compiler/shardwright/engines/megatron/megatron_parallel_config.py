"""A plan as arguments of Megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import PartialCheckpointing

_KINDS = {"embedding": "embedding", "head": "loss"}


def stage_layers(plan: Plan) -> list[list[str]]:
    """pipeline_model_parallel_layout: of each stage its layers' kinds. Stage s is chunk s //
    pipeline of pipeline rank s % pipeline
    (megatron/core/transformer/pipeline_parallel_layer_layout.py:45)."""
    return [[_KINDS.get(name, "decoder") for name in stage.layers] for stage in plan.stages]


def parallel_settings(plan: Plan) -> dict[str, Any]:
    import torch

    from shardwright.parallel.torch_dtypes import DTYPES

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
        # With batched sends two ranks of an interleaved pipeline would take each other's.
        "overlap_p2p_comm": s.virtual_stages > 1,
        "batch_p2p_comm": piped and s.virtual_stages == 1 and not plan.is_cpu,
        # gloo sends a buffer after the call that hands it over has returned.
        "deallocate_pipeline_outputs": piped and not plan.is_cpu,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **recompute_settings(plan),
    }


def recompute_settings(plan: Plan) -> dict[str, Any]:
    """Megatron counts the recomputed layers of each chunk from its first
    (megatron/core/transformer/transformer_block.py)."""
    choice = plan.strategy.activation_checkpointing
    if choice == "none":
        return {}
    if choice == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    most = max(len(s.layers) for s in plan.stages)
    if isinstance(choice, PartialCheckpointing):
        most = choice.full // plan.strategy.virtual_stages
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": most,
    }
