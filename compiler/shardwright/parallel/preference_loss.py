"""Reduce the log-probabilities of a micro-batch's rows to the loss of its pairs, in every layout,
and collect what the metrics and a reference's scores need."""

from __future__ import annotations

import torch
from torch import distributed as dist

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.models.tasks.preference import PAIR_LOSSES, Completions
from shardwright.recipe.objectives import METRICS, ObjectiveSection


class PreferenceLoss:
    """Return the sum of the pairs' losses times `scale`. Rows 2i and 2i + 1 are pair i's chosen and
    rejected completions.

    Pairs of which a row has no label, which only fill up a batch, do not count.

    metric_sums: of METRICS, and the number of pairs, since they were last read
    """

    def __init__(
        self,
        objective: ObjectiveSection,
        device: torch.device,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the group over whose ranks a row's tokens are sharded; None for whole rows."""
        self.objective, self.context_group = objective, context_group
        self.metric_sums = torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=device)

    def __call__(
        self,
        log_probabilities: torch.Tensor,
        labels: torch.Tensor,
        reference: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Return the loss.

        log_probabilities: (B,) fp64 sums over this rank's tokens
        labels: (B, S) aligned with their predictions
        reference: (B,) fp64 of the reference model
        """
        tokens, shards = (labels != IGNORE_INDEX).sum(dim=1), 1
        if self.context_group is not None:
            shards = dist.get_world_size(self.context_group)
            whole = torch.stack([log_probabilities.detach(), tokens.double()])
            dist.all_reduce(whole, group=self.context_group)
            # The value is the whole row's, and the gradient that of this rank's tokens.
            others = whole[0] - log_probabilities.detach()
            log_probabilities, tokens = log_probabilities + others, whole[1].long()
        counted = (tokens[0::2] > 0) & (tokens[1::2] > 0)
        chosen, rejected = (
            Completions(
                log_probabilities=log_probabilities[first::2],
                reference=None if reference is None else reference[first::2],
                tokens=tokens[first::2].clamp(min=1),
            )
            for first in (0, 1)
        )
        found = PAIR_LOSSES[self.objective.name](self.objective, chosen, rejected)
        rewards = found.rewards_chosen.detach(), found.rewards_rejected.detach()
        values = (*rewards, rewards[0] > rewards[1], rewards[0] - rewards[1])
        self.metric_sums += torch.stack(
            [torch.where(counted, value, 0).double().sum() for value in values]
            + [counted.double().sum()]
        )
        loss = torch.where(counted, found.losses, 0).sum().float() * scale
        # Engines add up values and gradients of all ranks: each of a row's shards has the whole
        # value, and its own tokens' gradient.
        return loss if shards == 1 else loss - loss.detach() * (1 - 1 / shards)

    def metrics(self, *, is_counted: bool) -> dict[str, float]:
        """Return the means of METRICS over the pairs of all ranks since the last call. Collective.

        is_counted: of the ranks that compute the same loss, one is
        """
        total = self.metric_sums if is_counted else torch.zeros_like(self.metric_sums)
        total = total.clone()
        dist.all_reduce(total)
        self.metric_sums.zero_()
        *sums, pairs = total.tolist()
        return {name: sum_ / max(1, pairs) for name, sum_ in zip(METRICS, sums, strict=True)}
