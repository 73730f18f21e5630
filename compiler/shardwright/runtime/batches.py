"""Which rows a rank trains on in which step. Every tensor and pipeline rank of a data rank sees the same batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shardwright.plan.plan import Plan
from shardwright.runtime.corpus import Rows

IGNORED = -100
"""Label of a token that is not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """input_ids, labels: (B, S) int64; labels are the inputs (the loss shifts them). position_ids: (B, S) where
    documents are packed, else None."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None

    @property
    def predicted(self) -> int:
        """Number of labels that the shifted loss counts."""
        return int((self.labels[:, 1:] != IGNORED).sum())


class Batches:
    """Deterministic order: step k of an epoch takes the k-th block of global_batch_size rows of the epoch's
    permutation (of the file's order without shuffle); the remainder of an epoch is dropped."""

    def __init__(self, plan: Plan, rows: Rows) -> None:
        self.rows, self.seed, self.shuffle = rows, plan.training.seed, plan.data.shuffle
        self.global_batch = plan.training.global_batch_size
        self.micro, self.accumulation = (
            plan.strategy.micro_batch_size,
            plan.strategy.gradient_accumulation_steps,
        )
        self.data = plan.strategy.data
        self.steps_per_epoch = len(rows.tokens) // self.global_batch
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """Rows of the global batch of `step` (from 1)."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            n = len(self.rows.tokens)
            order = np.random.default_rng([self.seed, epoch]).permutation(n) if self.shuffle else np.arange(n)
            self._order = (epoch, order)
        return self._order[1][position * self.global_batch : (position + 1) * self.global_batch]

    def micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        """The share of `data_rank`: micro-batch m takes rows [(m * data + rank) * B, ... + B) of the global batch."""
        indices = self.indices(step).reshape(self.accumulation, self.data, self.micro)[:, data_rank]
        return [self._micro_batch(i) for i in indices]

    def _micro_batch(self, indices: npt.NDArray[np.int64]) -> MicroBatch:
        input_ids = torch.from_numpy(self.rows.tokens[indices].astype(np.int64))
        labels = input_ids.clone()
        if self.rows.starts is None:
            return MicroBatch(input_ids=input_ids, labels=labels, position_ids=None)
        starts = torch.from_numpy(np.ascontiguousarray(self.rows.starts[indices]))
        labels[starts] = IGNORED
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        begins = torch.where(starts, places, 0).cummax(dim=1).values
        return MicroBatch(input_ids=input_ids, labels=labels, position_ids=places - begins)
