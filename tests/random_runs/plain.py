"""The plain loop that a random run is compared with: a Hugging Face model, torch's AdamW, one
process, nothing of the package but the rows that were drawn from the data.

A packed document goes through the model alone; padding behind a sequence is cut off. The learning
rate, the decay groups, the norm and the clipping are written out from docs/recipe.md.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.data.sequences import SequenceBatch
from tests.parity.router_aux_loss import row_loss
from tests.random_runs.draw import STEPS, Case

Sequences = list[tuple[torch.Tensor, torch.Tensor]]
"""(ids, labels) of each sequence that goes through the model alone, both (S,); label -100 is not
predicted."""
IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """unused: parameters that no loss reached. held_out: step -> validation loss behind it."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    held_out: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor]
    unused: set[str]


def rate_of(training: dict[str, Any], update: int) -> float:
    """Update k from 1 of STEPS: lr x min(1, k / warmup), then the curve, which reaches min_lr at
    the last one."""
    lr, s = training["optimizer"]["lr"], training["scheduler"]
    warmup, low = s["warmup_steps"], s.get("min_lr", 0)
    if update <= warmup:
        return float(lr * update / warmup)
    if s["name"] == "constant":
        return float(lr)
    if s["name"] == "wsd":
        behind = update - (STEPS - s["decay_steps"])
        return float(lr - (lr - low) * max(0, behind) / s["decay_steps"])
    share = (update - warmup) / (STEPS - warmup)
    curve = 1 - share if s["name"] == "linear" else (1 + math.cos(math.pi * share)) / 2
    return float(low + (lr - low) * curve)


def sequences(block: SequenceBatch, *, padded: bool = False) -> Sequences:
    """Each document of a packed row, or each row; a document's first token is no label, nor what is
    not trained on.

    padded: rows keep the padding behind their last label, whose length some rotary tables depend
    on."""
    found: Sequences = []
    for row in range(len(block.tokens)):
        ids = torch.from_numpy(block.tokens[row].astype(np.int64))
        trained = torch.ones(len(ids), dtype=torch.bool)
        if block.loss_mask is not None:
            trained = torch.from_numpy(block.loss_mask[row])
        labels = torch.where(trained, ids, IGNORE_INDEX)
        edges = [0, len(ids)]
        if block.starts is not None:
            edges = sorted({0, *np.flatnonzero(block.starts[row]).tolist(), len(ids)})
        for first, last in itertools.pairwise(edges):
            kept = labels[first:last]
            kept = torch.cat([kept.new_full((1,), IGNORE_INDEX), kept[1:]])
            if bool((kept != IGNORE_INDEX).any()):
                whole = padded and block.starts is None
                end = len(kept) if whole else int((kept != IGNORE_INDEX).nonzero().max()) + 1
                found.append((ids[first : first + end], kept[:end]))
    return found


def batched_rows(block: SequenceBatch, micro: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels), (B, S) each, of the micro-batches in turn: as the ranks compute them, where
    dropout draws by shape."""
    ids = torch.from_numpy(block.tokens.astype(np.int64))
    labels = (
        ids
        if block.loss_mask is None
        else torch.where(torch.from_numpy(block.loss_mask), ids, IGNORE_INDEX)
    )
    labels = torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, 1:]], dim=1)
    for at in range(0, len(ids), micro):
        yield ids[at : at + micro], labels[at : at + micro]


def summed_loss(
    model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, int]:
    """(sum of the cross-entropy in fp32 over all labels, their number)."""
    total, count = torch.zeros(()), 0
    for ids, labels in batches:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        total = total + nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        count += int((labels[:, 1:] != IGNORE_INDEX).sum())
    return total, count


class Routers:
    """DeepSeek-V3's balance loss (arXiv 2412.19437, equations 17 to 20) of the rows that went
    through a model, whose documents went through alone."""

    def __init__(self, model: nn.Module, sigmoid: bool) -> None:
        self.sigmoid = sigmoid
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        gates = [
            m
            for name, m in model.named_modules()
            if name.endswith((".mlp.gate", ".block_sparse_moe.gate"))
        ]
        assert gates
        self.gates = len(gates)
        for gate in gates:
            gate.register_forward_hook(
                lambda _m, _a, output: self.layers.append((output[0], output[2]))
            )

    def take(self, documents: list[int]) -> torch.Tensor:
        """The mean over layers and rows since the last call. documents: of each row, how many went
        through."""
        passes = iter(
            [self.layers[at : at + self.gates] for at in range(0, len(self.layers), self.gates)]
        )
        losses = []
        for n in documents:
            for layer in zip(*itertools.islice(passes, n), strict=True):
                logits, chosen = (torch.cat(parts) for parts in zip(*layer, strict=True))
                losses.append(row_loss(logits, chosen, 1, 0, self.sigmoid))
        assert next(passes, None) is None
        self.layers.clear()
        return torch.stack(losses).mean()


def documents(block: SequenceBatch) -> list[Sequences]:
    """Each row's documents in full, those without a label too; no padding."""
    lengths = (
        [block.tokens.shape[1]] * len(block.tokens)
        if block.lengths is None
        else block.lengths.tolist()
    )
    found = []
    for row, length in enumerate(lengths):
        ids = torch.from_numpy(block.tokens[row, :length].astype(np.int64))
        trained = torch.ones(length, dtype=torch.bool)
        if block.loss_mask is not None:
            trained = torch.from_numpy(block.loss_mask[row, :length])
        begins = [] if block.starts is None else np.flatnonzero(block.starts[row, :length]).tolist()
        edges = sorted({0, *begins, length})
        labels = torch.where(trained, ids, IGNORE_INDEX)
        labels[edges[:-1]] = IGNORE_INDEX
        found.append([(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(edges)])
    return found


def alone(
    block: SequenceBatch, padded: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for ids, labels in sequences(block, padded=padded):
        yield ids[None], labels[None]


def chooses_keys(config: dict[str, Any]) -> bool:
    """Whether attention looks at some keys alone, of which many have a score of exactly 0: which of
    those are taken depends on the row's length, in transformers too."""
    return any("index_topk" in part for part in (config, config.get("text_config", {})))


def train(
    case: Case,
    model: nn.Module,
    read: Callable[[int], SequenceBatch],
    held_out: SequenceBatch | None,
    begin: Callable[[nn.Module], None] = lambda model: None,
) -> Plain:
    """Train as the recipe says. read: rows of step k, in the order of the global batch. begin:
    called with the model before the first step."""
    training, validation = case.recipe["training"], case.recipe.get("validation")
    for pattern in case.recipe["model"].get("freeze", ()):
        for name, p in model.named_parameters():
            if fnmatch.fnmatchcase(name, pattern):
                p.requires_grad_(False)
    half, padded = (
        training["precision"] == "bf16",
        case.theme == "ropes" or chooses_keys(case.config),
    )
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone() if half else p for name, p in live.items()}
    if half:
        model.to(torch.bfloat16)
    o = training["optimizer"]
    groups = [
        {"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": o["weight_decay"]},
        {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=tuple(o["betas"]), eps=o["eps"]
    )
    losses, norms, rates, used = [], [], [], set()
    evaluations: dict[int, float] = {}

    def evaluate(step: int) -> None:
        """Where the recipe says so, and before the first step."""
        if (
            validation is None
            or held_out is None
            or (step % validation["every_steps"] and step != STEPS)
        ):
            return
        model.eval()
        with torch.no_grad():
            summed, labels = summed_loss(model, alone(held_out, padded))
        evaluations[step] = float(summed) / labels
        model.train()

    evaluate(0)
    coefficient = case.recipe["model"].get("router_aux_loss", 0.0)
    routers = (
        Routers(model, case.config["model_type"].startswith("deepseek")) if coefficient else None
    )
    model.train()
    begin(model)
    for step in range(1, STEPS + 1):
        block = read(step)
        micro = case.recipe["parallelism"]["micro_batch_size"]
        rows = documents(block)
        batches = batched_rows(block, micro) if case.theme == "dropout" else alone(block, padded)
        if routers:
            batches = ((ids[None], labels[None]) for row in rows for ids, labels in row)
        total, count = summed_loss(model, batches)
        loss = total / count
        balance = (
            coefficient * routers.take([len(row) for row in rows]) if routers else torch.zeros(())
        )
        (loss + balance).backward()
        for name, p in live.items():
            if p.grad is not None:
                used.add(name)
            if half and p.grad is not None:
                masters[name].grad, p.grad = p.grad.float(), None
        gradients = [p.grad for p in masters.values() if p.grad is not None]
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
        if training["gradient_clipping"]:
            nn.utils.clip_grad_norm_(masters.values(), training["gradient_clipping"])
        rates.append(rate_of(training, step))
        for group in adamw.param_groups:
            group["lr"] = rates[-1]
        adamw.step()
        adamw.zero_grad()
        if half:
            with torch.no_grad():
                for name, p in live.items():
                    p.copy_(masters[name])
        losses.append(float(loss.detach()))
        evaluate(step)
        if routers:
            routers.layers.clear()
    weights = {name: masters.get(name, p).detach().float() for name, p in model.named_parameters()}
    return Plain(
        losses=losses,
        grad_norms=norms,
        learning_rates=rates,
        held_out=evaluations,
        weights=weights,
        unused=set(live) - used,
    )
