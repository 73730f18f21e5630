"""Compute the learning rate of each update in closed form, and the weight decay groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.learning_rate_schedules import scheduled_rate
from shardwright.recipe.recipe_types import OptimizerSection


def learning_rate(
    optimizer: OptimizerSection, scheduler: PlanScheduler, steps: int, update: int
) -> float:
    """Return the rate of update `update` (from 1) of `steps`, the same in every engine.

    DeepSpeed's own WarmupLR warms up on a log curve by default, hence no DeepSpeed scheduler.
    """
    return scheduled_rate(optimizer.lr, scheduler, steps, update)


def decay_groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float
) -> list[dict[str, object]]:
    """Return two groups: ndim >= 2 decays (embeddings and 3-D experts too), the rest does not.

    Sharding keeps ndim, but a parameter that ZeRO-3 has partitioned looks empty; ds_shape is its
    shape.
    """
    named = [(n, p) for n, p in parameters if p.requires_grad]
    groups = [
        {
            "params": [p for _, p in named if len(getattr(p, "ds_shape", p.shape)) >= 2],
            "weight_decay": weight_decay,
        },
        {
            "params": [p for _, p in named if len(getattr(p, "ds_shape", p.shape)) < 2],
            "weight_decay": 0.0,
        },
    ]
    return [g for g in groups if g["params"]]
