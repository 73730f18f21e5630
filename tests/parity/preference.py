"""Preference training in one plain process: the losses written from the papers, over pairs of texts
that the file itself makes and tokenizes."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.parity.harness import (
    BETAS,
    DECAY,
    EPS,
    LENGTH,
    LR,
    SEED,
    STEPS,
    WARMUP,
    Case,
    recipe,
    with_adapters,
)
from tests.parity.models import MODELS
from tests.parity.reference import Reference, cosine, initial_model
from tests.parity.router_aux_loss import add_balance

METRICS = ("rewards_chosen", "rewards_rejected", "accuracy", "margin")


@dataclass(frozen=True)
class PreferenceCase(Case):
    """objective: of the recipe. resumed: saved at a step under ZeRO-1, and goes on under the
    case's layout."""

    objective: dict[str, Any] = field(default_factory=lambda: {"name": "dpo", "beta": 0.3})
    resumed: bool = False


@dataclass(frozen=True)
class PlainRun:
    """metrics: of each step, by name. scores: (pairs, 2) of the starting weights."""

    trained: Reference
    metrics: list[dict[str, float]]
    scores: np.ndarray


def texts(pairs: int) -> list[dict[str, str]]:
    """Records of odd lengths; some completions end beyond the sequence, and one prompt fills it."""
    random, letters = np.random.default_rng(SEED), "abcdefgh ijklmnopäqrstuvwxyz.\n"

    def words(least: int, most: int) -> str:
        count = int(random.integers(least, most))
        return "".join(random.choice(list(letters), count).tolist())

    records = [
        {"prompt": words(1, 12), "chosen": words(1, 9), "rejected": words(1, 40)}
        for _ in range(pairs)
    ]
    too_long = {"prompt": words(LENGTH + 1, LENGTH + 9), "chosen": "yes", "rejected": "no"}
    return [*records[:3], too_long, *records[3:]]


def write_pairs(case: PreferenceCase, folder: Path) -> None:
    """pairs.jsonl and recipe.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in texts(STEPS * case.batch)]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    document = recipe(case, folder)
    document["training"]["objective"] = case.objective
    document["data"] = {
        "kind": "preference",
        "path": "pairs.jsonl",
        "tokenizer": "byte",
        "shuffle": False,
    }
    (folder / "recipe.yaml").write_text(json.dumps(document, indent=1))


def rows(case: PreferenceCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids (2, S), whether a token is a label (2, S)) of each pair; chosen first."""
    found = []
    for record in texts(STEPS * case.batch):
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        is_label = torch.zeros(2, LENGTH, dtype=torch.bool)
        prompt = record["prompt"].encode()
        for row, name in enumerate(("chosen", "rejected")):
            whole = (prompt + record[name].encode())[:LENGTH]
            ids[row, : len(whole)] = torch.tensor(list(whole))
            is_label[row, len(prompt) : len(whole)] = True
        if is_label[:, 1:].any(dim=1).all():
            found.append((ids, is_label))
    return found


def log_probabilities(
    model: Any, ids: torch.Tensor, is_label: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over the labels (B,) in fp64, their number (B,))."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    labels = is_label[:, 1:]
    return (each * labels).double().sum(1), labels.sum(1)


def pair_loss(
    o: dict[str, Any], found: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses (n,), rewards (n, 2)). found, tokens, reference: (n, 2), chosen first."""
    name = o["name"]
    if name == "dpo":
        rewards = o["beta"] * (found - reference)
        logits = rewards[:, 0] - rewards[:, 1]
        wrong = o.get("label_smoothing", 0.0)
        losses = -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)
    elif name == "ipo":
        ratio = (found - reference) / (tokens if o.get("average") else 1)
        losses = (ratio[:, 0] - ratio[:, 1] - 1 / (2 * o["beta"])) ** 2
        rewards = o["beta"] * (found - reference)
    elif name == "simpo":
        rewards = o["beta"] * found / tokens
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - o["gamma"])
    else:
        p = (found / tokens).exp()
        odds = p / (1 - p)
        losses = -(found / tokens)[:, 0] - o["beta"] * F.logsigmoid((odds[:, 0] / odds[:, 1]).log())
        rewards = o["beta"] * found / tokens
    return losses, rewards


def plain_run(case: PreferenceCase) -> PlainRun:
    model = initial_model(MODELS[case.model], SEED)
    if case.balance:
        add_balance(model, case.balance)
    base = copy.deepcopy(model)
    if case.lora_rank:
        model = with_adapters(model, case)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=EPS,
    )
    pairs = rows(case)
    with torch.no_grad():
        scores = torch.stack([log_probabilities(base, *pair)[0] for pair in pairs])
    losses, norms, rates, metrics = [], [], [], []
    for step in range(1, STEPS + 1):
        here = range((step - 1) * case.batch, step * case.batch)
        ids, is_label = (torch.cat([pairs[i][part] for i in here]) for part in (0, 1))
        found, tokens = (x.view(-1, 2) for x in log_probabilities(model, ids, is_label))
        each, rewards = pair_loss(case.objective, found, tokens, scores[list(here)])
        each.mean().backward()
        squares = (float(p.grad.double().square().sum()) for p in trained if p.grad is not None)
        norms.append(math.sqrt(sum(squares)))
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(trained, case.clipping)
        rate = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, STEPS)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        losses.append(float(each.detach().mean()))
        rates.append(rate)
        chosen, rejected = rewards.detach().unbind(1)
        values = (chosen, rejected, (chosen > rejected).float(), chosen - rejected)
        metrics.append({n: float(v.mean()) for n, v in zip(METRICS, values, strict=True)})
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return PlainRun(Reference(losses, norms, rates, weights, frozenset()), metrics, scores.numpy())
