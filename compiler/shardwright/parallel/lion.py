"""Update weights by Lion (arXiv 2302.06675, algorithm 2): every element by itself."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.layout.optimizers import OPTIMIZERS

_CHUNK_ELEMENTS = 2**24
"""Bounds the temporary memory of an update; ZeRO's masters are flat and large."""


class Lion(torch.optim.Optimizer):
    """Move each weight by the learning rate, against the sign of its interpolated momentum.

    Weight decay is decoupled. The state of a parameter is its momentum, `exp_avg`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def moment_names(self, weight: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a weight's states, beside itself."""
        return OPTIMIZERS["lion"].moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
        state["step"] += 1
        rate, (beta1, beta2) = group["lr"], group["betas"]
        gradient = weight.grad
        assert gradient is not None
        flats = (weight.view(-1), gradient.reshape(-1), state["exp_avg"].view(-1))
        chunks = (flat.split(_CHUNK_ELEMENTS) for flat in flats)
        for values, slope, momentum in zip(*chunks, strict=True):
            values.mul_(1 - rate * group["weight_decay"])
            values.add_(torch.lerp(momentum, slope, 1 - beta1).sign_(), alpha=-rate)
            momentum.lerp_(slope, 1 - beta2)
