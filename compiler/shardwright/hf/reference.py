"""A plain single-process Hugging Face run: no plan, no DeepSpeed, nothing split. What every layout is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwright.hf.balance import RouterBalance
from shardwright.hf.objective import IGNORED
from shardwright.hf.plain_optimizer import PlainOptimizer

Rows = list[dict[str, torch.Tensor]]
"""The rows of one global batch, as model inputs with "labels"."""


@dataclass(frozen=True)
class Reference:
    """unused: parameters that the loss does not reach: a plain optimizer leaves them alone, ZeRO's decays them.
    held_out: step -> loss over the held-out rows after it."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    weights: dict[str, torch.Tensor]
    unused: frozenset[str]
    held_out: dict[int, float] = field(default_factory=dict)


def train(
    model: nn.Module,
    blocks: list[Rows],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    warmup: int,
    clipping: float,
    dtype: torch.dtype = torch.float32,
    own_loss: bool = True,
    held_out: Rows | None = None,
    every: int = 1,
    balance: RouterBalance | None = None,
) -> Reference:
    """blocks: per step. The loss is Hugging Face's own, sum over the predicted tokens / their number over all rows of
    the step. own_loss False: the model's own loss is another one, and next-token cross-entropy is taken from its
    logits. held_out: rows to evaluate after each `every` steps and after the last. balance: of the model's routers."""
    model.train()
    optimizer = PlainOptimizer(model, betas=betas, eps=eps, weight_decay=weight_decay, clipping=clipping, dtype=dtype)
    losses, norms, rates, evaluations = [], [], [], {}
    for step, rows in enumerate(blocks, 1):
        loss = mean_loss(model, rows, own_loss=own_loss, balance=balance)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.take_gradients()
        rate = lr * step / warmup if step <= warmup else cosine(lr, step, warmup, len(blocks))
        norms.append(optimizer.step(rate))
        if held_out is not None and (step % every == 0 or step == len(blocks)):
            with torch.no_grad():
                evaluations[step] = float(mean_loss(model.eval(), held_out, own_loss=own_loss))
            model.train()
        losses.append(float(loss.detach()))
        rates.append(rate)
    weights = {name: optimizer.masters.get(name, p).detach() for name, p in model.named_parameters()}
    unused = optimizer.unused | (weights.keys() - optimizer.masters.keys())
    return Reference(losses, norms, rates, weights, unused, evaluations)


def mean_loss(model: nn.Module, rows: Rows, *, own_loss: bool, balance: RouterBalance | None = None) -> torch.Tensor:
    """Over the predicted tokens of all rows; a balance loss adds to the gradients alone."""
    items = sum(int((r["labels"][:, 1:] != IGNORED).sum()) for r in rows)
    loss = torch.zeros(())
    for r in rows:
        if balance is not None:
            balance.share = len(r["input_ids"]) / sum(len(each["input_ids"]) for each in rows)
            balance.length = r["input_ids"].shape[1]
        if own_loss:
            loss = loss + model(**r, use_cache=False, num_items_in_batch=items).loss
        else:
            loss = loss + next_token_loss(model, **r) / items
    return loss


def next_token_loss(model: nn.Module, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Sum over the predicted tokens."""
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    target = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), target, ignore_index=IGNORED, reduction="sum")


def cosine(lr: float, step: int, warmup: int, steps: int) -> float:
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
