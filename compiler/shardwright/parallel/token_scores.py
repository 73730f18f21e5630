"""Collect the log-probabilities of labels from forward passes in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import distributed as dist

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.preference_loss import PreferenceLoss

Forward = Callable[[Iterable[MicroBatch]], object]
"""Runs sequences forward with the loss, without a gradient."""


def token_scores(
    loss: CausalLoss,
    forward: Forward,
    rows: ValidationBatches,
    *,
    length: int,
    first_token: int,
    is_counted: bool,
    device: torch.device,
    top: int = 0,
) -> torch.Tensor:
    """Return each token's log-probability (sequences of all examples, S) in fp32 on the CPU; 0
    where a token is no label. Collective.

    With `top` return (sequences, S, 2 + 2 top): log-probability, normalizer, and ids and
    log-probabilities of the largest logits.

    length: S
    first_token: of this rank's shard of each sequence, among context ranks
    is_counted: of the tensor ranks that compute the same values, one is
    """
    each = rows.rows_per_example or 1
    width = (2 + 2 * top,) if top else ()
    scores = torch.zeros(rows.examples, each, length, *width, device=device)
    # As in a step: an example's sequences together, or one after the other.
    passes: list[tuple[slice, Iterable[MicroBatch]]] = [(slice(0, each), rows)]
    if _labelled(loss) is not None:
        passes = [(slice(at, at + 1), [m.sequences_at(at) for m in rows]) for at in range(each)]
    for sequences, batches in passes:
        # Ranks of other stages compute no loss.
        found = _label_scores(loss, forward, batches, top)
        counted = zip(rows.numbers, found, strict=True) if is_counted and found else ()
        for numbers, values in counted:
            # A label is the token after the one whose logits predict it.
            start = first_token + 1
            stop = min(start + values.shape[1], length)
            is_example = torch.from_numpy(numbers >= 0)
            by_example = values[:, : stop - start].float().unflatten(0, (len(numbers), -1))
            places = torch.from_numpy(numbers)[is_example].to(device)
            scores[places, sequences, start:stop] = by_example[is_example.to(device)]
    if dist.is_initialized():
        dist.all_reduce(scores)
    return scores.flatten(0, 1).cpu()


def _label_scores(
    loss: CausalLoss, forward: Forward, batches: Iterable[MicroBatch], top: int = 0
) -> list[torch.Tensor]:
    """Return what the loss collects of each micro-batch's labels, as it aligns them."""
    loss.scores, loss.top = [], top
    forward(batches)
    found, loss.scores, loss.top = loss.scores, None, 0
    return found


def _labelled(loss: CausalLoss) -> PreferenceLoss | None:
    """Return the objective if its examples are labelled completions."""
    found = loss.objective
    is_labelled = isinstance(found, PreferenceLoss) and found.objective.traits.reads_labels
    return cast(PreferenceLoss, found) if is_labelled else None


def trained_sequences(
    loss: CausalLoss,
    forward: Forward,
    batches: Sequence[MicroBatch],
    *,
    is_counted: bool,
    is_first_shard: bool,
) -> Sequence[MicroBatch]:
    """Return the sequences that are trained on; of labelled completions, after the log-ratios of
    those of other prompts were measured. Collective.

    is_counted: of the tensor ranks that compute the same values, one is
    is_first_shard: of the context ranks that share each sequence, one is
    """
    preference = _labelled(loss)
    if preference is None:
        return batches
    others = [m.sequences_at(1) for m in batches]
    found = _label_scores(loss, forward, others)
    total = torch.zeros_like(preference.others).repeat(2)
    # Ranks of other stages compute no loss.
    for m, values in zip(others, found, strict=True) if is_counted and found else ():
        total[0] += values.double().sum()
        if is_first_shard:
            is_example = (m.labels[:, 1:] != IGNORE_INDEX).any(dim=1)
            assert m.reference is not None, "the objective reads a reference"
            total[0] -= m.reference[is_example].sum()
            total[1] += is_example.sum()
    dist.all_reduce(total)
    preference.others = (total[0] / total[1].clamp(min=1)).clamp(min=0)
    return [m.sequences_at(0) for m in batches]
