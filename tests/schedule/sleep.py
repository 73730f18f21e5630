"""A layer of a pipeline that takes given seconds and changes nothing."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Seconds(Protocol):
    forward_seconds: float
    backward_seconds: float


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: Seconds) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds.backward_seconds)
        return grad.clone(), None
