"""A rank's part of the model, built, and under the DeepSpeed engine that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from shardwright.engines.deepspeed.contrastive_trainer import ContrastiveTrainer
from shardwright.engines.deepspeed.data_parallel_trainer import DataParallelTrainer
from shardwright.engines.deepspeed.deepspeed_expert_groups import build_expert_sharder
from shardwright.engines.deepspeed.deepspeed_patches import patch_deepspeed
from shardwright.engines.deepspeed.pipeline_trainer import PipelineTrainer
from shardwright.engines.fp32_masters import fill_fp32_masters
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.expert_parallel import local_expert_range
from shardwright.parallel.lora_adapters import add_adapters
from shardwright.parallel.model_loading import conv1d_to_linear, open_model, scalars_to_vectors
from shardwright.parallel.router_balance_loss import router_balance
from shardwright.parallel.tensor_parallel_rng import TENSOR_PARALLEL_RNG
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.parallel.weight_shards import ShardReader
from shardwright.plan.plan import Plan


def build_trainer(plan: Plan, folder: Path, *, resumes: bool = False) -> Trainer:
    """Builds the model, cuts it as the plan says and hands it to the right engine. Process groups
    exist already.

    resumes: a checkpoint is loaded next, so that no weights are read or drawn.
    """
    patch_deepspeed()
    model, weights = open_model(plan, folder, resumes=resumes)
    transposed = conv1d_to_linear(model)
    scalars_to_vectors(model)
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    at = plan.ranks[dist.get_rank()]
    # Before the adapters, which have their values: it knows the parameters by Hugging Face's names.
    filler = WeightLoader(
        model,
        weights,
        splits,
        transposed,
        at.tensor,
        lambda n, count: local_expert_range(plan, at, n, count),
    )
    add_adapters(model, plan, transposed)
    experts, context = build_expert_sharder(plan, model), _context_group(plan)
    balance = router_balance(plan, model, context)
    config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    kind = ContrastiveTrainer if plan.model.contrastive else DataParallelTrainer
    trainer = (PipelineTrainer if plan.strategy.pipeline > 1 else kind)(
        plan, model, config, filler, experts
    )
    random_is_cut = plan.model.dropout > 0 and plan.strategy.tensor > 1
    trainer.balance = balance
    CONTEXT_PARALLEL.use(context, model)
    if not resumes:
        fill_fp32_masters(trainer.owned(), ShardReader(plan, weights, transposed))
    TENSOR_PARALLEL_RNG.use(trainer.grid.get_slice_parallel_rank() if random_is_cut else None)
    return trainer


def _context_group(plan: Plan) -> Any:
    """Collective: each rank makes all of the groups. Its own, or None."""
    if plan.strategy.context == 1:
        return None
    members: dict[tuple[int, ...], list[int]] = {}
    for r in plan.ranks:
        members.setdefault((r.pipeline, r.data, r.tensor), []).append(r.rank)
    groups = [(ranks, dist.new_group(ranks)) for ranks in members.values()]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)
