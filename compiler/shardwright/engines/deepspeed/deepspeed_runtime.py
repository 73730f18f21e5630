"""Implement DeepSpeed's EngineRuntime; imports DeepSpeed only once the process is prepared."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.engines.trainer_protocol import Trainer, share_host_cores
from shardwright.plan.plan import Plan


def prepare_process(plan: Plan, *, user_training_loop: bool) -> None:
    if plan.is_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        if not user_training_loop:
            # DeepSpeed checks whether the optimizer is its Muon, whose torch.compile imports all
            # of inductor: 2 s a rank.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def open_groups(plan: Plan) -> None:
    """Open the process groups. On a CPU, share the host's cores between its ranks."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if plan.is_cpu:
        share_host_cores(plan)
        # A JIT-compiled shared-memory all-reduce that training never calls: skip half a minute of
        # C++.
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_init_required=True, auto_mpi_discovery=False)


def build_trainer(
    plan: Plan, folder: Path, *, resumes: bool = False, forward_only: bool = False
) -> Trainer:
    from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer as build

    return build(plan, folder, resumes=resumes, forward_only=forward_only)


def close_groups() -> None:
    """Leave together: a process that finished can still die by SIGABRT in gloo's threads."""
    from deepspeed import comm as dist

    dist.barrier()
    dist.destroy_process_group()
