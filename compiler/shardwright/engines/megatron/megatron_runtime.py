"""Implement Megatron-Core's EngineRuntime; imports Megatron only once the process is prepared."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from shardwright.engines.megatron.expert_exchange import cuda_connections
from shardwright.engines.trainer_protocol import Trainer, share_host_cores
from shardwright.plan.plan import Plan


def prepare_process(plan: Plan, *, user_training_loop: bool) -> None:
    # Each of its modules warns once a rank that Transformer Engine and Apex are missing.
    warnings.filterwarnings("ignore", module="megatron")
    if plan.is_cpu:
        from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

        patch_torch_for_cpu()
        return
    if connections := cuda_connections(plan.strategy):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(connections.number))


def open_groups(plan: Plan) -> None:
    """Open the groups in Megatron's default rank order. Share the host's cores where they work."""
    import torch
    from torch import distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    if plan.is_cpu or plan.strategy.offload != "none":
        share_host_cores(plan)
    if plan.is_cpu:
        dist.init_process_group(plan.device.backend)
    else:
        torch.cuda.set_device(local)
        dist.init_process_group(
            plan.device.backend, device_id=torch.device(plan.device.torch_type, local)
        )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(**group_settings(plan))
    model_parallel_cuda_manual_seed(plan.training.seed)


def group_settings(plan: Plan) -> dict[str, Any]:
    """Return the arguments of initialize_model_parallel.

    Its gloo groups serve Megatron's checkpoints, which we do not use.
    """
    s = plan.strategy
    return {
        "tensor_model_parallel_size": s.tensor,
        "pipeline_model_parallel_size": s.pipeline,
        "context_parallel_size": s.context,
        "expert_model_parallel_size": s.expert,
        "expert_tensor_parallel_size": s.expert_tensor_ranks,
        "virtual_pipeline_model_parallel_size": s.virtual_stages if s.virtual_stages > 1 else None,
        "create_gloo_process_groups": False,
    }


def build_trainer(
    plan: Plan, folder: Path, *, resumes: bool = False, forward_only: bool = False
) -> Trainer:
    assert not forward_only, "`score` runs on DeepSpeed"
    from shardwright.engines.megatron.megatron_trainer import build_trainer as build

    return build(plan, folder, resumes=resumes)


def close_groups() -> None:
    """Leave together: a process that finished can still die by SIGABRT in gloo's threads."""
    from megatron.core import parallel_state
    from torch import distributed as dist

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
