"""Compute the losses of preference objectives, reward models and distillation in one plain process,
a sequence at a time, from the papers' formulas.

They are independent of models/tasks/preference.py and parallel/, which they are compared with.
The entries of Rows have further keys here: "reference", the log-probability under a reference
model; "desirable", a completion's label; "teacher", ids and log-probabilities (n - 1, K) of a
teacher's most probable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.recipe.objectives import METRICS, NEXT_TOKEN, ObjectiveSection
from shardwright.utils.numeric_difference import max_abs_diff
from shardwright.verify.reference_run import (
    Measure,
    Measured,
    ReferenceAuxLoss,
    Rows,
    next_token_measure,
)

Entry = dict[str, Any]


def reference_measure(objective: ObjectiveSection, *, own_loss: bool) -> Measure:
    """Return what measures the objective.

    own_loss: of next tokens, Hugging Face's own loss
    """
    traits = objective.traits
    if objective.name == NEXT_TOKEN:
        return partial(next_token_measure, own_loss)
    if traits.reads_teacher:
        return DistillationMeasure(objective.teacher_weight or 0.0)
    if traits.scores_sequences:
        return RewardMeasure(objective.center_coefficient or 0.0)
    return LabelledMeasure(objective) if traits.reads_labels else PairMeasure(objective)


def label_log_probabilities(model: nn.Module, entry: Entry) -> torch.Tensor:
    """Return the log-probability (fp32) of each label of a sequence."""
    labels = entry["labels"][0, 1:]
    logits = model(input_ids=entry["input_ids"], use_cache=False).logits[0, :-1].float()
    is_label = labels != IGNORE_INDEX
    found: torch.Tensor = logits.log_softmax(-1)[is_label].gather(-1, labels[is_label, None])[:, 0]
    return found


@torch.no_grad()
def add_reference(model: nn.Module, rows: Rows) -> None:
    """Give each sequence its log-probability under a reference model."""
    for entry in rows:
        entry["reference"] = _completion(model, entry)[0]


@torch.no_grad()
def teacher_difference(model: nn.Module, rows: Rows) -> float:
    """Return the largest difference between the log-probabilities of the teacher's tokens in `rows`
    and the largest that the model gives to the same places.

    Sorted values are compared: equally likely tokens have no order.
    """
    worst = 0.0
    for entry in rows:
        is_label = entry["labels"][0, 1:] != IGNORE_INDEX
        if not is_label.any():
            continue
        ids, found = (each[is_label] for each in entry["teacher"])
        logits = model(input_ids=entry["input_ids"], use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1)[is_label].double()
        largest = own.topk(found.shape[-1], dim=-1).values
        worst = max(worst, max_abs_diff(found, largest), max_abs_diff(found, own.gather(-1, ids)))
    return worst


def _completion(
    model: nn.Module, entry: Entry, balance: ReferenceAuxLoss | None = None
) -> tuple[torch.Tensor, int]:
    """Return (log-probability in fp64, tokens) of a completion."""
    found = label_log_probabilities(model, entry)
    if balance is not None:
        balance.take(entry)
    return found.double().sum(), len(found)


def _measured(
    loss: torch.Tensor, metrics: dict[str, float], balance: ReferenceAuxLoss | None
) -> Measured:
    """Add the auxiliary loss to the gradients alone."""
    if balance is not None:
        added = balance.loss()
        loss = loss + added - added.detach()
    return loss, metrics


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean() if values else torch.zeros(())


def _reward_metrics(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Return the metrics of rewards (chosen, rejected)."""
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    values = (chosen, rejected, (chosen > rejected).double(), chosen - rejected)
    return {name: float(v.mean()) for name, v in zip(METRICS, values, strict=True)}


@dataclass(frozen=True, slots=True)
class PairMeasure:
    """Measure an objective of chosen and rejected completions: entries 2i and 2i + 1."""

    objective: ObjectiveSection

    def __call__(
        self, model: nn.Module, rows: Rows, balance: ReferenceAuxLoss | None = None
    ) -> Measured:
        formula = PAIR_FORMULAS[self.objective.name]
        if balance is not None:
            balance.begin()
        losses, rewards = [], []
        for pair in zip(rows[0::2], rows[1::2], strict=True):
            (chosen, count), (rejected, other) = (_completion(model, e, balance) for e in pair)
            if self.objective.traits.reads_reference:
                chosen, rejected = chosen - pair[0]["reference"], rejected - pair[1]["reference"]
            loss, own = formula(self.objective, chosen, rejected, count, other)
            losses.append(loss)
            rewards.append((own[0].detach(), own[1].detach()))
        return _measured(_mean(losses), _reward_metrics(rewards), balance)


PairFormula = Callable[
    [ObjectiveSection, torch.Tensor, torch.Tensor, int, int],
    tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
]
"""(objective, log-ratios or log-probabilities of the chosen and of the rejected completion, their
tokens) -> (loss, both rewards)."""


def _dpo(
    o: ObjectiveSection, chosen: torch.Tensor, rejected: torch.Tensor, _count: int, _other: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Equation 7 of arXiv 2305.18290; a share `label_smoothing` of the labels is wrong."""
    assert o.beta is not None
    rewards, wrong = (o.beta * chosen, o.beta * rejected), o.label_smoothing or 0.0
    right = -torch.log(torch.sigmoid(rewards[0] - rewards[1]))
    flipped = -torch.log(torch.sigmoid(rewards[1] - rewards[0]))
    return (1 - wrong) * right + wrong * flipped, rewards


def _ipo(
    o: ObjectiveSection, chosen: torch.Tensor, rejected: torch.Tensor, count: int, other: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Equation 17 of arXiv 2310.12036, of sums, or of means with `average`."""
    assert o.beta is not None
    tokens = (count, other) if o.average else (1, 1)
    loss = (chosen / tokens[0] - rejected / tokens[1] - 0.5 / o.beta) ** 2
    return loss, (o.beta * chosen, o.beta * rejected)


def _simpo(
    o: ObjectiveSection, chosen: torch.Tensor, rejected: torch.Tensor, count: int, other: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Equation 6 of arXiv 2405.14734."""
    assert o.beta is not None and o.gamma is not None
    rewards = (o.beta / count * chosen, o.beta / other * rejected)
    return -torch.log(torch.sigmoid(rewards[0] - rewards[1] - o.gamma)), rewards


def _orpo(
    o: ObjectiveSection, chosen: torch.Tensor, rejected: torch.Tensor, count: int, other: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Equations 5 to 7 of arXiv 2403.07691: probabilities of a token, and their odds."""
    assert o.beta is not None
    means = (chosen / count, rejected / other)
    odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
    ratio = -torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    return o.beta * ratio - means[0], (o.beta * means[0], o.beta * means[1])


PAIR_FORMULAS: dict[str, PairFormula] = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo}


@dataclass(frozen=True, slots=True)
class LabelledMeasure:
    """Measure KTO, equation 8 of arXiv 2402.01306. Entry 2i is a completion; entry 2i + 1 is one of
    another prompt's, of which z0 is made."""

    objective: ObjectiveSection

    def __call__(
        self, model: nn.Module, rows: Rows, balance: ReferenceAuxLoss | None = None
    ) -> Measured:
        o = self.objective
        assert o.beta is not None
        with torch.no_grad():
            others = [_completion(model, e)[0] - e["reference"] for e in rows[1::2]]
        z0 = max(0.0, float(_mean(others)))
        if balance is not None:
            balance.begin()
        losses, rewards = [], {True: list[float](), False: list[float]()}
        right = 0
        for entry in rows[0::2]:
            ratio, is_desirable = (
                _completion(model, entry, balance)[0] - entry["reference"],
                entry["desirable"],
            )
            weight = o.desirable_weight if is_desirable else o.undesirable_weight
            assert weight is not None
            gain = ratio - z0 if is_desirable else z0 - ratio
            losses.append(weight - weight * torch.sigmoid(o.beta * gain))
            reward = o.beta * float(ratio.detach())
            rewards[is_desirable].append(reward)
            right += (reward > 0) == is_desirable
        chosen, rejected = (sum(rewards[k]) / max(1, len(rewards[k])) for k in (True, False))
        values = (chosen, rejected, right / len(losses), chosen - rejected)
        return _measured(_mean(losses), dict(zip(METRICS, values, strict=True)), balance)


@dataclass(frozen=True, slots=True)
class RewardMeasure:
    """Measure the Bradley-Terry loss, equation 1 of arXiv 2203.02155, of the score that
    transformers pools; `center` times the squared sum of a pair's scores is added."""

    center: float

    def __call__(
        self, model: nn.Module, rows: Rows, balance: ReferenceAuxLoss | None = None
    ) -> Measured:
        if balance is not None:
            balance.begin()
        scores = []
        for entry in rows:
            scores.append(model(input_ids=entry["input_ids"], use_cache=False).logits[0, 0])
            if balance is not None:
                balance.take(entry)
        pairs = list(zip(scores[0::2], scores[1::2], strict=True))
        losses = [
            self.center * (chosen + rejected) ** 2 - F.logsigmoid(chosen - rejected)
            for chosen, rejected in pairs
        ]
        metrics = _reward_metrics([(a.detach(), b.detach()) for a, b in pairs])
        return _measured(_mean(losses), metrics, balance)


@dataclass(frozen=True, slots=True)
class DistillationMeasure:
    """Measure the divergence from a teacher of K tokens and the rest (docs/distillation.md), in
    fp64 over the whole vocabulary."""

    teacher_weight: float

    def __call__(
        self, model: nn.Module, rows: Rows, balance: ReferenceAuxLoss | None = None
    ) -> Measured:
        if balance is not None:
            balance.begin()
        divergences, cross_entropies, count = torch.zeros(()).double(), torch.zeros(()).double(), 0
        for entry in rows:
            logits = model(input_ids=entry["input_ids"], use_cache=False).logits[0, :-1]
            if balance is not None:
                balance.take(entry)
            labels = entry["labels"][0, 1:]
            is_label = labels != IGNORE_INDEX
            student = logits[is_label].double().log_softmax(-1)
            ids, top = (each[is_label] for each in entry["teacher"])
            others = torch.ones_like(student, dtype=torch.bool).scatter(-1, ids, False)
            rest = 1 - top.exp().sum(-1)
            own_rest = (student.exp() * others).sum(-1)
            divergences = divergences + (top.exp() * (top - student.gather(-1, ids))).sum()
            divergences = divergences + (rest * (rest.log() - own_rest.log())).sum()
            cross_entropies = cross_entropies - student.gather(-1, labels[is_label, None]).sum()
            count += int(is_label.sum())
        kl, next_token_loss = divergences / count, cross_entropies / count
        loss = self.teacher_weight * kl + (1 - self.teacher_weight) * next_token_loss
        metrics = {"kl": float(kl.detach()), "next_token_loss": float(next_token_loss.detach())}
        return _measured(loss, metrics, balance)
