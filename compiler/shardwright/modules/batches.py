"""Which rows a rank trains on in which step. Every tensor and pipeline rank of a data rank sees the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shardwright.data.dataset import Dataset, validation_batches
from shardwright.data.rows import Rows, TokenBlock
from shardwright.data.sources import packs
from shardwright.hf.objective import IGNORED
from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """input_ids, labels: (B, S) int64; labels are the inputs (the loss shifts them). position_ids: (B, S) where
    documents are packed, else None. shifted: labels stand where they are predicted, as in a piece of a row."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    shifted: bool = False

    @property
    def predicted(self) -> int:
        """Number of labels that the loss counts."""
        return int(((self.labels if self.shifted else self.labels[:, 1:]) != IGNORED).sum())


class Batches:
    """The rows of the dataset's order, shared out over the data ranks."""

    def __init__(self, plan: Plan, data: Dataset) -> None:
        self.data = data
        s = plan.strategy
        self.shape = (s.gradient_accumulation_steps, s.data, s.micro_batch_size)
        self.packed = packs(plan)

    def micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        """The share of `data_rank` in `step` (from 1): micro-batch m takes rows [(m * data + rank) * B, ... + B) of the
        global batch."""
        indices = self.data.order.indices(step).reshape(self.shape)[:, data_rank]
        return [_micro_batch(self.data.train.read(i), self.packed) for i in indices]


class HeldOut:
    """The share of a data rank of all held-out rows: as many micro-batches on each rank, so that none waits for
    another; rows that only fill one up have no labels. Read anew at each pass: they may be more than memory holds.

    at_once: micro-batches that go through the pipeline together; their number is a multiple of it."""

    def __init__(self, plan: Plan, rows: Rows, data_rank: int) -> None:
        s = plan.strategy
        # DeepSpeed numbers DualPipeV's buffers by the training's micro-batches: as many at once, or its engine fails.
        at_once = s.gradient_accumulation_steps if s.schedule == "dualpipev" else None
        # An interleaved schedule takes as many as there are pipeline ranks, or a multiple.
        multiple = at_once or (s.pipeline if s.virtual_stages > 1 else 1)
        numbers = validation_batches(len(rows), s.data * s.micro_batch_size, multiple)
        self._rows, self._numbers = rows, numbers.reshape(-1, s.data, s.micro_batch_size)[:, data_rank]
        self.at_once = at_once or len(self._numbers)
        self._packed = packs(plan)
        self.predicted = sum(m.predicted for m in self)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[MicroBatch]:
        for numbers in self._numbers:
            batch = _micro_batch(self._rows.read(np.maximum(numbers, 0)), self._packed)
            batch.labels[torch.from_numpy(numbers < 0)] = IGNORED
            yield batch


def _micro_batch(block: TokenBlock, packed: bool) -> MicroBatch:
    """packed: with position ids, whether this block needs them or not: what crosses stages must not change its form."""
    input_ids = torch.from_numpy(block.tokens.astype(np.int64))
    labels = input_ids.clone()
    if block.trained is not None:
        labels[torch.from_numpy(~block.trained)] = IGNORED
    if not packed:
        return MicroBatch(input_ids=input_ids, labels=labels, position_ids=None)
    starts = torch.from_numpy(np.zeros(block.tokens.shape, dtype=np.bool_) if block.starts is None else block.starts)
    labels[starts] = IGNORED
    places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    begins = torch.where(starts, places, 0).cummax(dim=1).values
    return MicroBatch(input_ids=input_ids, labels=labels, position_ids=places - begins)
