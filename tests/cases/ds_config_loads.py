"""Loads each compiled folder's ds_config.json in DeepSpeed as one rank of a world that does not
exist.

Arguments: compiled folders. Prints one JSON line each; a failure is a traceback and exit 1. One
process for all, since importing DeepSpeed takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch.distributed
from deepspeed.comm import comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.engines.deepspeed.deepspeed_groups import hpz_group
from shardwright.plan.plan import Plan, read_plan

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled


def load(folder: Path) -> dict[str, object]:
    plan = read_plan(folder)
    s, last = plan.strategy, plan.ranks[-1]
    torch.distributed.init_process_group(
        "fake", rank=last.rank, world_size=s.world_size, store=FakeStore()
    )
    try:
        deepspeed.init_distributed(
            dist_backend="fake", dist_init_required=False, auto_mpi_discovery=False
        )
        topology = PipeModelDataParallelTopology(
            num_pp=s.pipeline, num_mp=s.tensor, num_dp=s.zero_world_size
        )
        for rank in plan.ranks:
            coordinates = topology.get_coord(rank.rank)
            shard = rank.data * s.context + rank.context
            assert (coordinates.pipe, coordinates.data, coordinates.model) == (
                rank.pipeline,
                shard,
                rank.tensor,
            )
        config = DeepSpeedConfig(
            str(folder / "ds_config.json"), mpu=PipelineParallelGrid(topology=topology)
        )
        sharing = _sharing_weights(plan)
    finally:
        torch.distributed.destroy_process_group()
        comm.cdb = None
    return {
        "data": config.world_size,
        "batch": config.train_batch_size,
        "micro": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "zero": int(config.zero_optimization_stage),
        "clipping": config.gradient_clipping,
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "optimizer": config.optimizer_name,
        "accumulation_dtype": config.grad_accum_dtype,
        "bucket": config.zero_config.reduce_bucket_size,
        "offload": _offload(config.zero_config),
        "hpz": config.zero_config.zero_hpz_partition_size,
        "sharing": sharing,
    }


def _sharing_weights(plan: Plan) -> int:
    """Ranks, all of one node, that share the last rank's second copy of the weights; 1 without
    hpZ."""
    group = hpz_group(plan)
    ranks = (
        [plan.ranks[-1].rank] if group is None else torch.distributed.get_process_group_ranks(group)
    )
    assert len({(plan.ranks[rank].node, plan.ranks[rank].tensor) for rank in ranks}) == 1
    return len(ranks)


def _offload(zero: DeepSpeedZeroConfig) -> str:
    if zero.offload_param is not None:
        return "parameters"
    return "none" if zero.offload_optimizer is None else "optimizer"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        with contextlib.redirect_stdout(sys.stderr):
            loaded = load(Path(argument))
        print(json.dumps(loaded))
