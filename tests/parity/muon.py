"""Muon in one plain process, written from Keller Jordan's post (kellerjordan.github.io/posts/muon)
and arXiv 2502.16982; AdamW for the rest is torch's."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tests.parity.harness import BETAS, DECAY, EPS
from tests.parity.plain_training import Update, decaying_groups

MUON_LR, ADAMW_LR, MOMENTUM, NS_STEPS = 5e-3, 1e-3, 0.9, 4

OPTIMIZER = {
    "name": "muon",
    "lr": MUON_LR,
    "momentum": MOMENTUM,
    "ns_steps": NS_STEPS,
    "adamw_lr": ADAMW_LR,
    "betas": list(BETAS),
    "eps": EPS,
    "weight_decay": DECAY,
}
HEADS, HEAD = 4, 16
"""Query heads of the fused models, and the features of each."""


def zeropower(g: torch.Tensor) -> torch.Tensor:
    """The post's zeropower_via_newtonschulz5 on one matrix."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x: torch.Tensor = g / (g.norm() + 1e-7)
    if g.size(0) > g.size(1):
        x = x.t()
    for _ in range(NS_STEPS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if g.size(0) > g.size(1) else x


def rows_of_matrices(model: str, leaf: str, rows: int) -> list[torch.Tensor]:
    """The rows (output features) of each matrix that a weight joins, as the model reads them."""
    every = torch.arange(rows)
    if leaf == "query_key_value":  # GPT-NeoX, BLOOM: each head has its query, key and value
        return [every.view(HEADS, 3, HEAD)[:, i].reshape(-1) for i in range(3)]
    if leaf == "qkv_proj":  # Phi-3: all queries, then the fewer keys and values
        return list(every.split([HEADS * HEAD, HEADS * HEAD // 2, HEADS * HEAD // 2]))
    if leaf == "gate_up_proj" and model == "gpt_oss":
        return [every[0::2], every[1::2]]
    return list(every.chunk({"c_attn": 3, "gate_up_proj": 2}.get(leaf, 1)))


def orthogonal_update(g: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
    """g: (out, in), or (experts, out, in)."""
    if g.ndim == 3:
        return torch.stack([orthogonal_update(each, matrices) for each in g])
    update = torch.zeros_like(g)
    for rows in matrices:
        part = g[rows]
        update[rows] = zeropower(part) * max(1.0, part.size(0) / part.size(1)) ** 0.5
    return update


def muon_update(model: Any) -> Update:
    transposed = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Conv1D)}
    named = dict(model.named_parameters())
    if model.config.model_type == "gpt_oss":
        transposed |= {name for name, p in named.items() if p.ndim == 3}
    matrices = {
        name: p
        for name, p in named.items()
        if (".layers." in name or ".h." in name) and p.ndim >= 2 and not name.endswith("_bias")
    }
    rest = [p for name, p in named.items() if name not in matrices]
    adamw = torch.optim.AdamW(decaying_groups(rest, DECAY), betas=BETAS, eps=EPS)
    momentum = {name: torch.zeros_like(p) for name, p in matrices.items()}

    def update(rate: float) -> None:
        for group in adamw.param_groups:
            group["lr"] = rate * ADAMW_LR / MUON_LR
        for name, p in matrices.items():
            _update(p, momentum[name], rate, (model.config.model_type, name), name in transposed)
        adamw.step()

    return update


def _update(
    p: Any, buffer: torch.Tensor, rate: float, at: tuple[str, str], is_transposed: bool
) -> None:
    """One matrix: Nesterov's momentum, Newton-Schulz, decoupled weight decay."""
    buffer.mul_(MOMENTUM).add_(p.grad)
    g = p.grad + MOMENTUM * buffer
    model, name = at
    g = g.mT if is_transposed else g
    matrices = rows_of_matrices(model, name.removesuffix(".weight").rpartition(".")[2], g.size(-2))
    update = orthogonal_update(g, matrices)
    p.mul_(1 - rate * DECAY).sub_(update.mT if is_transposed else update, alpha=rate)
