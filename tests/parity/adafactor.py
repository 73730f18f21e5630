"""Adafactor in one plain process: torch's, and transformers' where the weight does not scale the
rate."""

from __future__ import annotations

from typing import Any

import torch
from transformers.optimization import Adafactor

from tests.parity.harness import DECAY
from tests.parity.plain_training import Update, decaying_groups

# An epsilon above a gradient's rounding, which an expert with few tokens would divide by itself.
ADAFACTOR_LR, EPS, SCALE_EPS, THRESHOLD, DECAY_RATE = 1e-2, 1e-6, 2e-3, 1.5, -0.7

OPTIMIZER = {
    "name": "adafactor",
    "lr": ADAFACTOR_LR,
    "eps": EPS,
    "scale_eps": SCALE_EPS,
    "clip_threshold": THRESHOLD,
    "beta2_decay": DECAY_RATE,
    "weight_decay": DECAY,
}
UNSCALED = OPTIMIZER | {"lr": 1e-4, "scale_parameter": False, "eps": 1e-15}


def adafactor_update(model: Any) -> Update:
    optimizer = torch.optim.Adafactor(
        decaying_groups(list(model.parameters()), DECAY),
        beta2_decay=DECAY_RATE,
        eps=(EPS, SCALE_EPS),
        d=THRESHOLD,
    )
    return _stepping(optimizer)


def unscaled_update(model: Any) -> Update:
    return _stepping(
        Adafactor(
            decaying_groups(list(model.parameters()), DECAY),
            lr=1e-4,
            eps=(1e-30, SCALE_EPS),
            clip_threshold=THRESHOLD,
            decay_rate=DECAY_RATE,
            scale_parameter=False,
            relative_step=False,
        )
    )


def _stepping(optimizer: torch.optim.Optimizer) -> Update:
    def update(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    return update
