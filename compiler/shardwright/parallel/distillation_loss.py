"""Compute the loss of distillation from a teacher's K most probable tokens, over a whole or a
sharded vocabulary.

Letters: (...) tokens; V the vocabulary ids of this rank; K the teacher's tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.recipe.objectives import ObjectiveSection

_SMALLEST = 1e-30
"""Keeps the quotient of two probabilities below the largest fp32 number."""


class _TopKDivergence(torch.autograd.Function):
    """Saves no matrix of the vocabulary but the logits, which the head's backward pass keeps: the
    probabilities are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ids: torch.Tensor,
        teacher: torch.Tensor,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = logits.float()
        highest = values.amax(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        is_label = target != IGNORE_INDEX
        named = torch.cat([target.unsqueeze(-1), ids.long()], dim=-1)
        here = (named >= first) & (named < first + logits.shape[-1]) & is_label.unsqueeze(-1)
        place = (named - first).masked_fill(~here, 0)
        own = (values.gather(-1, place) - highest).masked_fill(~here, 0.0)
        exponentials = (values - highest).exp_()
        total = exponentials.sum(dim=-1, keepdim=True)
        # Less itself is exactly 0, where the sum less the K largest would be rounding.
        taken = exponentials.gather(-1, place[..., 1:]).masked_fill(~here[..., 1:], 0.0)
        rest = exponentials.scatter_add_(-1, place[..., 1:], -taken).sum(dim=-1, keepdim=True)
        sums = torch.cat([own, here, total, rest], dim=-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        student, is_known, total, rest = sums.split([own.shape[-1]] * 2 + [1, 1], dim=-1)
        student, log_rest = student - total.log(), (rest / total).clamp(min=_SMALLEST).log()
        # A token that the student lacks is one of the others.
        top = teacher.exp() * is_known[..., 1:]
        # Without other tokens, what 1 is more than their sum is rounding.
        others = (1 - top.sum(dim=-1, keepdim=True)).clamp(min=0).masked_fill(rest == 0, 0.0)
        divergence = (top * (teacher - student[..., 1:])).sum(dim=-1, keepdim=True)
        divergence += torch.xlogy(others, others) - others * log_rest
        ctx.save_for_backward(
            logits, highest, total, place, here, top, others / log_rest.exp(), is_label
        )
        return (
            (-student[..., 0]).masked_fill(~is_label, 0.0),
            divergence.squeeze(-1).masked_fill(~is_label, 0.0),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, highest, total, place, here, top, quotient, is_label = ctx.saved_tensors
        by_label, by_teacher = (
            each.float().masked_fill(~is_label, 0.0).unsqueeze(-1) for each in gradients
        )
        # Their logarithm would round probabilities of large logits.
        found = (logits.float() - highest).exp_().div_(total)
        own = found.gather(-1, place[..., 1:])
        found *= by_label + by_teacher * (1 - quotient)
        correction = torch.cat([-by_label, by_teacher * (own * quotient - top)], dim=-1)
        found.scatter_add_(-1, place, correction.masked_fill(~here, 0.0))
        return found.to(logits.dtype), None, None, None, None, None


def top_k_divergence(
    logits: torch.Tensor,
    target: torch.Tensor,
    ids: torch.Tensor,
    teacher: torch.Tensor,
    *,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cross-entropy of the labels, KL divergence of the student from the teacher), (...)
    fp32 each; 0 where there is no label.

    The divergence is of K + 1 outcomes: each of the teacher's tokens, and any other one. Where the
    K tokens are the vocabulary it is the whole divergence (Hinton et al., arXiv 1503.02531, at
    temperature 1), otherwise its lower bound. A teacher renormalized over its K tokens would teach
    that there are no others (arXiv 2503.16870).

    logits: (..., V), whose dtype the gradient has
    target: (...) ids
    ids, teacher: (..., K) different tokens, and their log-probabilities under the teacher. An id
        that no rank has is one of the others.
    first: the vocabulary id of this rank's first logit
    group: of the ranks that share the vocabulary; None for a whole one
    """
    divergence: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _TopKDivergence.apply
    return divergence(logits, target, ids, teacher, first, group)


class DistillationLoss:
    """Weigh the divergence from the teacher against the labels' cross-entropy."""

    def __init__(self, objective: ObjectiveSection, device: torch.device) -> None:
        assert objective.teacher_weight is not None, "it has a default"
        self.weight = objective.teacher_weight
        # Sums since the metrics were last read, in the order of `sums`.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def __call__(self, sums: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the loss of a micro-batch's labels.

        sums: (3,) of the labels' cross-entropies, of the divergences, and the number of labels
        """
        self._sums += sums.detach().double()
        loss = (1 - self.weight) * sums[0] + self.weight * sums[1]
        return loss * scale

    def metrics(self, *, is_counted: bool) -> dict[str, float]:
        """Return the objective's metrics, means over the labels of all ranks since the last call.
        Collective.

        is_counted: of the tensor ranks that compute the same loss, one is
        """
        total = self._sums.clone() if is_counted else torch.zeros_like(self._sums)
        dist.all_reduce(total)
        self._sums.zero_()
        next_token_loss, kl = (total[:2] / total[2].clamp(min=1)).tolist()
        return {"kl": kl, "next_token_loss": next_token_loss}
