"""Which tokens of a row each context rank has: of twice as many pieces as there are ranks one from
the front and one from the back, so that causal attention is shared out evenly. Megatron's own
order: its rotary angles follow it (megatron/core/models/common/embeddings/rope_utils.py,
get_pos_emb_on_this_cp_rank)."""

from __future__ import annotations

import torch

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.micro_batches import MicroBatch


def rank_positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """(length / ranks,): places in the row."""
    if ranks == 1:
        return torch.arange(length)
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def gathered_positions(length: int, ranks: int) -> torch.Tensor:
    """(length,): of the ranks' pieces one behind the other."""
    return torch.cat([rank_positions(length, ranks, rank) for rank in range(ranks)])


def zigzag_shard(batch: MicroBatch, ranks: int, rank: int) -> MicroBatch:
    """A rank's tokens, the labels moved to where they are predicted. position_ids stay as they are:
    whole rows', of which the mask of packed documents is made. One rank: the batch itself."""
    if ranks == 1:
        return batch
    places = rank_positions(batch.input_ids.shape[1], ranks, rank)
    ahead = torch.cat(
        (batch.labels[:, 1:], torch.full_like(batch.labels[:, :1], IGNORE_INDEX)), dim=1
    )
    return MicroBatch(
        input_ids=batch.input_ids[:, places],
        labels=ahead[:, places],
        position_ids=batch.position_ids,
        shifted=True,
    )
