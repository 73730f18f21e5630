"""Build the optimizers that DeepSpeed's engines take as a client's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwright.engines.deepspeed.adafactor_optimizer import ShardedAdafactor
from shardwright.engines.deepspeed.adamw_8bit_optimizer import ShardedAdamW8bit
from shardwright.engines.deepspeed.muon_optimizer import MuonAdamW
from shardwright.parallel.lion import Lion
from shardwright.plan.plan import Plan

OptimizerOfGroups = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def own_optimizer(plan: Plan) -> OptimizerOfGroups | None:
    """Return what builds the plan's optimizer of its parameter groups; None where DeepSpeed
    does."""
    optimizer = plan.optimizer
    builders: dict[str, OptimizerOfGroups] = {
        "muon": partial(MuonAdamW, plan),
        "adamw_8bit": partial(ShardedAdamW8bit, plan),
        "lion": partial(Lion, lr=optimizer.lr, betas=optimizer.betas),
        "adafactor": partial(ShardedAdafactor, plan),
    }
    return builders.get(optimizer.name)
