"""The piece of a row that a context rank trains on."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.micro_batches import MicroBatch


def contiguous_shard(batch: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """S/s neighbouring tokens of each row; the batch itself where there is one rank. Its labels are
    shifted before the cut, for a piece's last label is the first token of the next piece.
    position_ids stay those of the whole rows."""
    if ranks == 1:
        return batch
    shifted = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(ranks, dim=1)[rank].contiguous()

    return replace(batch, input_ids=own(batch.input_ids), labels=own(shifted), shifted=True)
