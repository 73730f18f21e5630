"""Compute the learning rate of each update in closed form, and the weight decay groups."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.recipe_types import OptimizerSection


def learning_rate(
    optimizer: OptimizerSection, scheduler: PlanScheduler, steps: int, update: int
) -> float:
    """Return the rate of update `update` (from 1) of `steps`: lr * min(1, k / warmup), then the
    curve.

    DeepSpeed's own WarmupLR warms up on a log curve by default, hence no DeepSpeed scheduler.
    """
    lr, warmup, low = optimizer.lr, scheduler.warmup_steps, scheduler.min_lr
    if update <= warmup:
        return lr * update / warmup
    if scheduler.name == "constant":
        return lr
    if scheduler.name == "wsd":
        decay = scheduler.decay_steps or 0
        done = update - (steps - decay)
        return lr if done <= 0 else lr + (low - lr) * done / decay
    progress = (update - warmup) / max(1, steps - warmup)
    if scheduler.name == "linear":
        return lr + (low - lr) * progress
    return low + (lr - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


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
