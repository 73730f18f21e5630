"""Compute the losses of objectives that compare a chosen and a rejected completion of one prompt.

Letters: n pairs. A completion's log-probability is the sum over its tokens: fp64 of fp32 values;
its mean divides by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwright.recipe.objectives import ObjectiveSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Hold one completion of each of n pairs: the chosen, or the rejected ones.

    scores: (n,) log-probabilities under the trained model; of a reward model its outputs
    reference: (n,) of the reference model; None for objectives that read none
    tokens: (n,) at least 1
    """

    scores: torch.Tensor
    reference: torch.Tensor | None
    tokens: torch.Tensor

    @property
    def log_ratios(self) -> torch.Tensor:
        """Return the log-probabilities less those of the reference."""
        assert self.reference is not None, "the objective reads a reference"
        return self.scores - self.reference

    @property
    def means(self) -> torch.Tensor:
        return self.scores / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLosses:
    """Hold each pair's loss, and the implicit rewards of its completions; (n,) each."""

    losses: torch.Tensor
    rewards_chosen: torch.Tensor
    rewards_rejected: torch.Tensor


def dpo(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> PairLosses:
    """Compute Direct Preference Optimization: equation 7 of arXiv 2305.18290.

    With label smoothing the conservative form (equation 3 of https://ericmitchell.ai/cdpo.pdf).
    """
    rewards = [_beta(o) * each.log_ratios for each in (chosen, rejected)]
    margin, wrong = rewards[0] - rewards[1], o.label_smoothing or 0.0
    losses = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
    return PairLosses(losses=losses, rewards_chosen=rewards[0], rewards_rejected=rewards[1])


def ipo(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> PairLosses:
    """Compute Identity Preference Optimization: equation 17 of arXiv 2310.12036, with beta as its
    tau.

    The paper's log-ratios are of whole completions. `average` divides each by its number of tokens,
    as TRL does, so that long completions do not decide the loss.
    """
    ratios = [each.log_ratios / (each.tokens if o.average else 1) for each in (chosen, rejected)]
    losses = (ratios[0] - ratios[1] - 1 / (2 * _beta(o))).square()
    rewards = [_beta(o) * each.log_ratios for each in (chosen, rejected)]
    return PairLosses(losses=losses, rewards_chosen=rewards[0], rewards_rejected=rewards[1])


def simpo(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> PairLosses:
    """Compute Simple Preference Optimization: equation 6 of arXiv 2405.14734."""
    assert o.gamma is not None, "it has a default"
    rewards = [_beta(o) * each.means for each in (chosen, rejected)]
    losses = -F.logsigmoid(rewards[0] - rewards[1] - o.gamma)
    return PairLosses(losses=losses, rewards_chosen=rewards[0], rewards_rejected=rewards[1])


def orpo(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> PairLosses:
    """Compute Odds Ratio Preference Optimization: equations 5 to 7 of arXiv 2403.07691, with beta
    as its lambda.

    Its probabilities are of a token: exp of the mean log-probability (equation 3).
    """
    odds = chosen.means - rejected.means
    odds = odds - (_log1mexp(chosen.means) - _log1mexp(rejected.means))
    losses = -chosen.means - _beta(o) * F.logsigmoid(odds)
    rewards = [_beta(o) * each.means for each in (chosen, rejected)]
    return PairLosses(losses=losses, rewards_chosen=rewards[0], rewards_rejected=rewards[1])


def reward(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> PairLosses:
    """Compute the Bradley-Terry loss of a reward model: equation 1 of arXiv 2203.02155.

    `center_coefficient` adds the squared sum of a pair's rewards (equation 2 of arXiv 2312.09244),
    as TRL does: differences alone leave the rewards' mean free.
    """
    assert o.center_coefficient is not None, "it has a default"
    losses = -F.logsigmoid(chosen.scores - rejected.scores)
    losses = losses + o.center_coefficient * (chosen.scores + rejected.scores).square()
    return PairLosses(losses=losses, rewards_chosen=chosen.scores, rewards_rejected=rejected.scores)


def kto(
    o: ObjectiveSection, completions: Completions, is_desirable: torch.Tensor, others: torch.Tensor
) -> PairLosses:
    """Compute Kahneman-Tversky Optimization: equation 8 of arXiv 2402.01306, of n completions.

    is_desirable: (n,) bool
    others: z0, the mean log-ratio of completions of other prompts, at least 0

    The rewards are 0 for completions of the other label.
    """
    assert o.desirable_weight is not None and o.undesirable_weight is not None
    ratios = completions.log_ratios
    signs = torch.where(is_desirable, 1.0, -1.0)
    weights = torch.where(is_desirable, o.desirable_weight, o.undesirable_weight)
    losses = weights * (1 - torch.sigmoid(_beta(o) * signs * (ratios - others)))
    rewards = _beta(o) * ratios
    return PairLosses(
        losses=losses,
        rewards_chosen=torch.where(is_desirable, rewards, 0.0),
        rewards_rejected=torch.where(is_desirable, 0.0, rewards),
    )


def _beta(o: ObjectiveSection) -> float:
    assert o.beta is not None, "it has a default"
    return o.beta


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of negative numbers, without cancellation near 0."""
    near_zero = x > -0.693
    # The branch not taken must have a finite gradient, too.
    return torch.where(
        near_zero,
        torch.log(-torch.expm1(torch.where(near_zero, x, -0.5))),
        torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x))),
    )


PAIR_LOSSES: Mapping[str, Callable[[ObjectiveSection, Completions, Completions], PairLosses]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "reward": reward,
}
"""Maps an objective of recipe/objectives.py that compares pairs to its loss."""
