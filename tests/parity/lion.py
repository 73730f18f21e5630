"""Lion in one plain process, written from algorithm 2 of arXiv 2302.06675."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.harness import DECAY

LION_LR, LION_BETAS = 1e-4, (0.9, 0.98)

OPTIMIZER = {"name": "lion", "lr": LION_LR, "betas": list(LION_BETAS), "weight_decay": DECAY}

UNDECIDED = 5e-5
"""Share of the root mean square below which rounding decides the sign of an update."""


class LionUpdate:
    """Update a model's weights.

    undecided: marks the weights of which some update's sign is rounding's; two right runs differ
        there by twice the learning rate
    """

    def __init__(self, model: Any) -> None:
        self._momentum = {p: torch.zeros_like(p) for p in model.parameters()}
        self.undecided = {p: torch.zeros_like(p, dtype=torch.bool) for p in self._momentum}

    def __call__(self, rate: float) -> None:
        beta1, beta2 = LION_BETAS
        for p, m in self._momentum.items():
            c = beta1 * m + (1 - beta1) * p.grad
            near = UNDECIDED * c.square().mean().sqrt()
            self.undecided[p] |= (c != 0) & (c.abs() <= near)
            decay = DECAY if p.ndim >= 2 else 0.0
            p.sub_(rate * (torch.sign(c) + decay * p))
            m.copy_(beta2 * m + (1 - beta2) * p.grad)
