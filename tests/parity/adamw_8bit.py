"""torchao's AdamW8bit in one plain process, on the weights (out, in)."""

from __future__ import annotations

from typing import Any

import torch
from torchao.optim import AdamW8bit
from transformers.pytorch_utils import Conv1D

from tests.parity.harness import BETAS, DECAY, EPS
from tests.parity.plain_training import Update, decaying_groups

ADAMW_8BIT_LR = 1e-4

OPTIMIZER = {
    "name": "adamw_8bit",
    "lr": ADAMW_8BIT_LR,
    "betas": list(BETAS),
    "eps": EPS,
    "weight_decay": DECAY,
}


def adamw_8bit_update(model: Any) -> Update:
    transposed = {m.weight for m in model.modules() if isinstance(m, Conv1D)}
    twins = {
        p: torch.nn.Parameter((p.t() if p in transposed else p).detach().clone().contiguous())
        for p in model.parameters()
    }
    optimizer = AdamW8bit(decaying_groups(list(twins.values()), DECAY), betas=BETAS, eps=EPS)

    def update(rate: float) -> None:
        for p, twin in twins.items():
            twin.grad = (p.grad.t() if p in transposed else p.grad).contiguous()
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            optimizer.step()
        for p, twin in twins.items():
            p.copy_(twin.detach().t() if p in transposed else twin.detach())

    return update
