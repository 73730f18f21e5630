"""Collect the log-probabilities of labels from forward passes in any layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.micro_batches import ValidationBatches


def token_scores(
    loss: CausalLoss,
    evaluate: Callable[[ValidationBatches], object],
    rows: ValidationBatches,
    *,
    length: int,
    first_token: int,
    is_counted: bool,
    device: torch.device,
) -> torch.Tensor:
    """Return each token's log-probability (sequences of all examples, S) in fp32 on the CPU; 0
    where a token is no label. Collective.

    evaluate: runs the rows forward with this loss
    length: S
    first_token: of this rank's shard of each sequence, among context ranks
    is_counted: of the tensor ranks that compute the same values, one is
    """
    loss.scores = []
    evaluate(rows)
    found, loss.scores = loss.scores, None
    each = rows.rows_per_example
    scores = torch.zeros(rows.examples, each, length, device=device)
    # Ranks of other stages compute no loss.
    counted = zip(rows.numbers, found, strict=True) if is_counted and found else ()
    for numbers, values in counted:
        # A label is the token after the one whose logits predict it.
        start = first_token + 1
        stop = min(start + values.shape[1], length)
        is_example = torch.from_numpy(numbers >= 0)
        by_example = values[:, : stop - start].float().reshape(len(numbers), each, -1)
        places = torch.from_numpy(numbers)[is_example].to(device)
        scores[places, :, start:stop] = by_example[is_example.to(device)]
    if dist.is_initialized():
        dist.all_reduce(scores)
    return scores.flatten(0, 1).cpu()
