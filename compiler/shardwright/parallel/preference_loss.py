"""Reduce what the model gives a micro-batch's rows to the loss of its pairs, in every layout,
and collect what the metrics and a reference's scores need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.models.tasks.preference import PAIR_LOSSES, Completions, PairLosses, kto
from shardwright.recipe.objectives import METRICS, ObjectiveSection


class PreferenceLoss:
    """Return the sum of the examples' losses times `scale`. Of pairs, rows 2i and 2i + 1 are the
    chosen and the rejected completion.

    Examples of which a row has no label, which only fill up a batch, do not count.

    others: z0 of labelled completions, set before each step
    """

    def __init__(
        self,
        objective: ObjectiveSection,
        device: torch.device,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the group over whose ranks a row's tokens are sharded; None for whole rows."""
        self.objective, self.context_group = objective, context_group
        # Sums of METRICS since they were last read, and what each is a mean over.
        self._sums = torch.zeros(2, len(METRICS), dtype=torch.float64, device=device)
        self.others = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(
        self,
        scores: torch.Tensor,
        labels: torch.Tensor,
        beside: Sequence[torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Return the loss.

        scores: (B,) fp64: the labels' log-probabilities, or a reward model's outputs, summed over
            this rank's tokens
        labels: (B, S) aligned with what is summed
        beside: (B,) fp64 of the reference model, and (B,) whether the row is desirable, where the
            objective reads them
        """
        tokens, shards = (labels != IGNORE_INDEX).sum(dim=1), 1
        if self.context_group is not None:
            shards = dist.get_world_size(self.context_group)
            whole = torch.stack([scores.detach(), tokens.double()])
            dist.all_reduce(whole, group=self.context_group)
            # The value is the whole row's, and the gradient that of this rank's tokens.
            others = whole[0] - scores.detach()
            scores, tokens = scores + others, whole[1].long()
        reference = beside[0] if beside else None

        def completions(first: int, each: int) -> Completions:
            return Completions(
                scores=scores[first::each],
                reference=None if reference is None else reference[first::each],
                tokens=tokens[first::each].clamp(min=1),
            )

        o = self.objective
        if o.traits.compares_pairs:
            is_counted = (tokens[0::2] > 0) & (tokens[1::2] > 0)
            found = PAIR_LOSSES[o.name](o, completions(0, 2), completions(1, 2))
            self._count_pairs(found, is_counted)
        else:
            is_counted, is_desirable = tokens > 0, beside[1]
            found = kto(o, completions(0, 1), is_desirable, self.others)
            self._count_labelled(found, is_counted, is_desirable)
        loss = torch.where(is_counted, found.losses, 0).sum().float() * scale
        # Engines add up values and gradients of all ranks: each of a row's shards has the whole
        # value, and its own tokens' gradient.
        return loss if shards == 1 else loss - loss.detach() * (1 - 1 / shards)

    def _count_pairs(self, found: PairLosses, is_counted: torch.Tensor) -> None:
        chosen, rejected = found.rewards_chosen.detach(), found.rewards_rejected.detach()
        for at, values in enumerate((chosen, rejected, chosen > rejected, chosen - rejected)):
            self._sums[0, at] += torch.where(is_counted, values, 0).double().sum()
            self._sums[1, at] += is_counted.sum()

    def _count_labelled(
        self, found: PairLosses, is_counted: torch.Tensor, is_desirable: torch.Tensor
    ) -> None:
        """Count rewards by label. The margin is the difference of their means."""
        rewards = (found.rewards_chosen + found.rewards_rejected).detach()
        is_right = (rewards > 0) == is_desirable
        groups = (is_counted & is_desirable, is_counted & ~is_desirable, is_counted)
        for at, (values, group) in enumerate(
            zip((rewards, rewards, is_right), groups, strict=True)
        ):
            self._sums[0, at] += torch.where(group, values, 0).double().sum()
            self._sums[1, at] += group.sum()

    def metrics(self, *, is_counted: bool) -> dict[str, float]:
        """Return the means of METRICS over the examples of all ranks since the last call.
        Collective.

        is_counted: of the tensor ranks that compute the same loss, one is
        """
        # Of the ranks that share each row, all have the whole row's value.
        is_first = self.context_group is None or dist.get_rank(self.context_group) == 0
        total = self._sums.clone() if is_counted and is_first else torch.zeros_like(self._sums)
        dist.all_reduce(total)
        self._sums.zero_()
        means = total[0] / total[1].clamp(min=1)
        found = dict(zip(METRICS, means.tolist(), strict=True))
        if not self.objective.traits.compares_pairs:
            found["margin"] = found["rewards_chosen"] - found["rewards_rejected"]
        return found
