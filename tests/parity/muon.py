"""Muon in one plain process, written from Keller Jordan's post (kellerjordan.github.io/posts/muon)
and arXiv 2502.16982; AdamW for the rest is torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from tests.parity.harness import BETAS, DECAY, EPS, SEED, STEPS, WARMUP, Case
from tests.parity.models import MODELS
from tests.parity.reference import Reference, cosine, initial_model, token_rows

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
MATRICES_A_WEIGHT = {"c_attn": 3, "gate_up_proj": 2}
"""Last part of a module's or parameter's name -> equal matrices that the weight joins."""


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


def orthogonal_update(g: torch.Tensor, joined: int) -> torch.Tensor:
    """g: (out, in), or (experts, out, in)."""
    if g.ndim == 3:
        return torch.stack([orthogonal_update(each, joined) for each in g])
    parts = [
        zeropower(part) * max(1.0, part.size(0) / part.size(1)) ** 0.5 for part in g.chunk(joined)
    ]
    return torch.cat(parts)


def muon_reference(case: Case, tokens: np.ndarray) -> Reference:
    model = initial_model(MODELS[case.model], SEED)
    transposed = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Conv1D)}
    named = dict(model.named_parameters())
    matrices = {
        name: p
        for name, p in named.items()
        if (".layers." in name or ".h." in name) and p.ndim >= 2
    }
    rest = [p for name, p in named.items() if name not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=EPS,
    )
    momentum = {name: torch.zeros_like(p) for name, p in matrices.items()}
    losses, norms, rates = [], [], []
    for step in range(1, STEPS + 1):
        [rows] = token_rows(tokens, step, case.batch)
        labels = rows["labels"][:, 1:]
        loss = model(**rows, use_cache=False, num_items_in_batch=labels.numel()).loss
        loss.backward()
        norms.append(_norm(model))
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        rate = MUON_LR * step / WARMUP if step <= WARMUP else cosine(MUON_LR, step, WARMUP, STEPS)
        for group in adamw.param_groups:
            group["lr"] = rate * ADAMW_LR / MUON_LR
        with torch.no_grad():
            for name, p in matrices.items():
                _update(p, momentum[name], rate, name, name in transposed)
        adamw.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
        rates.append(rate)
    weights = {name: p.detach() for name, p in named.items()}
    return Reference(losses, norms, rates, weights, frozenset())


def _update(p: Any, buffer: torch.Tensor, rate: float, name: str, is_transposed: bool) -> None:
    """One matrix: Nesterov's momentum, Newton-Schulz, decoupled weight decay."""
    buffer.mul_(MOMENTUM).add_(p.grad)
    g = p.grad + MOMENTUM * buffer
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    joined = MATRICES_A_WEIGHT.get(leaf, 1)
    update = orthogonal_update(g.T if is_transposed else g, joined)
    p.mul_(1 - rate * DECAY).sub_(update.T if is_transposed else update, alpha=rate)


def _norm(model: torch.nn.Module) -> float:
    squares = (
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    )
    return math.sqrt(sum(squares))
