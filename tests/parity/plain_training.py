"""Train in one plain process, by an update that a test writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.parity.harness import BETAS, DECAY, EPS, LR, SEED, STEPS, WARMUP, Case
from tests.parity.models import MODELS
from tests.parity.reference import Reference, cosine, initial_model, token_rows

Update = Callable[[float], None]
"""Updates a model's weights from their gradients, at a learning rate."""


def plain_training(
    case: Case, tokens: np.ndarray, lr: float, prepare: Callable[[Any], Update]
) -> Reference:
    """prepare: takes the model and returns its update. Weights that it leaves undecided are NaN."""
    model = initial_model(MODELS[case.model], SEED)
    update = prepare(model)
    losses, norms, rates = [], [], []
    for step in range(1, STEPS + 1):
        [rows] = token_rows(tokens, step, case.batch)
        labels = rows["labels"][:, 1:]
        loss = model(**rows, use_cache=False, num_items_in_batch=labels.numel()).loss
        loss.backward()
        norms.append(_norm(model))
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        rate = lr * step / WARMUP if step <= WARMUP else cosine(lr, step, WARMUP, STEPS)
        with torch.no_grad():
            update(rate)
        model.zero_grad()
        losses.append(float(loss.detach()))
        rates.append(rate)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if p in (undecided := getattr(update, "undecided", {})):
            weights[name][undecided[p]] = math.nan
    return Reference(losses, norms, rates, weights, frozenset())


HELD_OUT = 5
"""Examples of an evaluation: no multiple of any layout's micro-batches."""

Measure = Callable[[range], tuple[torch.Tensor, dict[str, float]]]
"""Returns the mean loss of these examples, and the objective's metrics of them."""


@dataclass(frozen=True)
class PlainObjective:
    """Hold what a plain loop of an objective found.

    metrics: of each step, by name, and last those of the evaluation. held_out_loss: after training,
    of the first HELD_OUT examples.
    """

    trained: Reference
    metrics: list[dict[str, float]]
    held_out_loss: float


def train_by_objective(model: Any, case: Case, measure: Measure) -> PlainObjective:
    """Train by AdamW, then evaluate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(decaying_groups(trained, DECAY), betas=BETAS, eps=EPS)
    losses, norms, rates, metrics = [], [], [], []
    for step in range(1, STEPS + 1):
        loss, own = measure(range((step - 1) * case.batch, step * case.batch))
        metrics.append(own)
        loss.backward()
        norms.append(_norm(model))
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(trained, case.clipping)
        rate = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, STEPS)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        losses.append(float(loss.detach()))
        rates.append(rate)
    # peft puts its own modules around the model.
    weights = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): p.detach()
        for name, p in model.named_parameters()
    }
    with torch.no_grad():
        loss, own = measure(range(HELD_OUT))
    found = Reference(losses, norms, rates, weights, frozenset())
    return PlainObjective(found, [*metrics, own], float(loss))


def decaying_groups(parameters: list[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _norm(model: torch.nn.Module) -> float:
    squares = (
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    )
    return math.sqrt(sum(squares))
