"""DeepSeek-V3's balance loss in a plain process, row by row and layer by layer (arXiv 2412.19437,
equations 17 to 20): written from the paper, apart from what is tested."""

from __future__ import annotations

from typing import Any

import torch


def add_balance(model: torch.nn.Module, coefficient: float) -> None:
    """Add the balance loss to the gradients, not to the model's loss: logs have the cross-entropy
    alone."""
    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    gates = [
        m
        for name, m in model.named_modules()
        if name.endswith((".mlp.gate", ".block_sparse_moe.gate"))
    ]
    assert gates
    for gate in gates:
        gate.register_forward_hook(lambda _m, _a, output: routed.append((output[0], output[2])))
    hf: Any = model
    inner, sigmoid = hf.forward, hf.config.model_type.startswith("deepseek")

    def forward(*args: Any, **kwargs: Any) -> Any:
        routed.clear()
        output = inner(*args, **kwargs)
        rows = len(kwargs["input_ids"])
        losses = [row_loss(*layer, rows, row, sigmoid) for layer in routed for row in range(rows)]
        loss = coefficient * torch.stack(losses).sum() / len(losses)
        output.loss = output.loss + loss - loss.detach()
        return output

    model.forward = forward


def row_loss(
    logits: torch.Tensor, chosen: torch.Tensor, rows: int, row: int, sigmoid: bool
) -> torch.Tensor:
    logits, chosen = (x.unflatten(0, (rows, -1))[row] for x in (logits, chosen))
    tokens, experts = logits.shape
    affinity = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    total = torch.zeros(())
    for expert in range(experts):
        f = experts / (chosen.shape[1] * tokens) * int((chosen == expert).sum())
        p = (affinity[:, expert] / affinity.sum(dim=-1)).sum() / tokens
        total = total + f * p
    return total
