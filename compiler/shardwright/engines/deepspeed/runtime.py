"""Process groups of a run: opened before DeepSpeed builds anything, closed in order."""

from __future__ import annotations

import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan


def check_world(plan: Plan) -> None:
    """Raises Refusal where the world is not the plan's."""
    world = int(os.environ["WORLD_SIZE"])
    if world != plan.strategy.world_size:
        raise Refusal(
            Diagnostic(
                code="SW6003",
                message=f"the launcher started {world} ranks, the plan is for {plan.strategy.world_size} "
                f"({plan.nodes} x {plan.gpus_per_node})",
                help="Give the hosts that the plan was made for, or compile for the cluster at hand.",
            )
        )


def open_groups(plan: Plan) -> None:
    """Shares the host's cores between its ranks on a CPU."""
    if plan.is_cpu:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_SIZE", str(plan.gpus_per_node)))))
        # A JIT-compiled shared-memory all-reduce that training never calls: skip half a minute of C++.
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_init_required=True, auto_mpi_discovery=False)


def close_groups() -> None:
    """A process that finished can still die by SIGABRT in gloo's threads: leave together."""
    from deepspeed import comm as dist

    dist.barrier()
    dist.destroy_process_group()
