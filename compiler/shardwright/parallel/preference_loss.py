"""Reduce what the model gives a micro-batch's tokens to the loss of its pairs, in every layout,
and collect what the metrics and a reference's scores need.

B: sequences; S: tokens of each; N: completions, of which sequences have one each, or, packed, an
even number each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from shardwright.models.tasks.preference import PAIR_LOSSES, Completions, PairLosses, kto
from shardwright.recipe.objectives import METRICS, ObjectiveSection


class PreferenceLoss:
    """Return the sum of the examples' losses times `scale`. Of pairs, completions 2i and 2i + 1 are
    the chosen and the rejected one.

    Examples of which a completion has no label, which only fill up a batch, do not count.

    others: z0 of labelled completions, set before each step
    """

    def __init__(
        self,
        objective: ObjectiveSection,
        device: torch.device,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the group over whose ranks a sequence's tokens are sharded; None for whole ones."""
        self.objective, self.context_group = objective, context_group
        # Sums of METRICS since they were last read, and what each is a mean over.
        self._sums = torch.zeros(2, len(METRICS), dtype=torch.float64, device=device)
        self.others = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(
        self,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        completions: torch.Tensor | None,
        beside: Sequence[torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Return the loss.

        scores: (B, S) the labels' log-probabilities, or a reward model's outputs, of this rank's
            tokens; 0 where a token is no label
        tokens: (N,) labels of each completion, over all context ranks
        completions: (B, S) which completion each of the scores belongs to; None where each
            sequence is one
        beside: (N,) fp64 of the reference model, and (N,) whether the completion is desirable,
            where the objective reads them
        """
        # Completions are compared: rounding a sum over thousands of tokens would show.
        each, shards = scores.double(), 1
        if completions is None:
            scores = each.sum(dim=1)
        else:
            scores = each.new_zeros(len(tokens)).index_add(0, completions.flatten(), each.flatten())
        if self.context_group is not None:
            shards = dist.get_world_size(self.context_group)
            whole = scores.detach().clone()
            dist.all_reduce(whole, group=self.context_group)
            # The value is the whole completion's, and the gradient that of this rank's tokens.
            scores = scores + (whole - scores.detach())
        reference = beside[0] if beside else None

        def at(first: int, each: int) -> Completions:
            return Completions(
                scores=scores[first::each],
                reference=None if reference is None else reference[first::each],
                tokens=tokens[first::each].clamp(min=1),
            )

        o = self.objective
        if o.traits.compares_pairs:
            is_counted = (tokens[0::2] > 0) & (tokens[1::2] > 0)
            found = PAIR_LOSSES[o.name](o, at(0, 2), at(1, 2))
            self._count_pairs(found, is_counted)
        else:
            is_counted, is_desirable = tokens > 0, beside[1]
            found = kto(o, at(0, 1), is_desirable, self.others)
            self._count_labelled(found, is_counted, is_desirable)
        loss = torch.where(is_counted, found.losses, 0).sum().float() * scale
        # Engines add up values and gradients of all ranks: each shard of a sequence has the whole
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
        # Of the ranks that share each sequence, all have the whole completions' values.
        is_first = self.context_group is None or dist.get_rank(self.context_group) == 0
        total = self._sums.clone() if is_counted and is_first else torch.zeros_like(self._sums)
        dist.all_reduce(total)
        self._sums.zero_()
        means = total[0] / total[1].clamp(min=1)
        found = dict(zip(METRICS, means.tolist(), strict=True))
        if not self.objective.traits.compares_pairs:
            found["margin"] = found["rewards_chosen"] - found["rewards_rejected"]
        return found
