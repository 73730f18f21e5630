"""Data order: every rank computes the same, data ranks are disjoint, packing restarts positions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardwright.runtime.batches import Batches
from shardwright.runtime.corpus import Rows


def plan(*, shuffle: bool, data: int = 2, micro: int = 2, accumulation: int = 3) -> SimpleNamespace:
    return SimpleNamespace(
        training=SimpleNamespace(seed=3, global_batch_size=data * micro * accumulation),
        strategy=SimpleNamespace(data=data, micro_batch_size=micro, gradient_accumulation_steps=accumulation),
        data=SimpleNamespace(shuffle=shuffle),
    )


def rows(n: int, length: int = 4) -> Rows:
    return Rows(tokens=np.arange(n * length, dtype=np.int32).reshape(n, length), starts=None)


def test_unshuffled_step_takes_its_block_of_rows() -> None:
    batches = Batches(plan(shuffle=False), rows(30))
    assert batches.indices(1).tolist() == list(range(12))
    assert batches.indices(2).tolist() == list(range(12, 24))
    assert batches.indices(3).tolist() == list(range(12)), "rows 24-29 are no full batch: a new epoch starts"


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_ranks_share_out_the_global_batch(shuffle: bool) -> None:
    batches = Batches(plan(shuffle=shuffle), rows(30))
    for step in (1, 2, 3, 7):
        seen = [m.input_ids for rank in (0, 1) for m in batches.micro_batches(step, rank)]
        assert torch.cat(seen)[:, 0].div(4).sort().values.tolist() == sorted(batches.indices(step).tolist())


def test_shuffle_visits_each_row_once_an_epoch_and_differs_between_epochs() -> None:
    batches = Batches(plan(shuffle=True), rows(24))
    epochs = [np.concatenate([batches.indices(s) for s in (2 * e + 1, 2 * e + 2)]) for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0].tolist() != epochs[1].tolist()
    assert Batches(plan(shuffle=True), rows(24)).indices(3).tolist() == epochs[1][:12].tolist(), "no state in the order"


def test_packing_restarts_positions_and_drops_first_labels() -> None:
    starts = np.array([[False, False, True, False], [True, True, False, False]])
    packed = Rows(tokens=np.array([[5, 6, 7, 8], [1, 2, 3, 4]]), starts=starts)
    batch = Batches(plan(shuffle=False, data=1, micro=2, accumulation=1), packed).micro_batches(1, 0)[0]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]
    assert batch.labels.tolist() == [[5, 6, -100, 8], [-100, -100, 3, 4]]
    assert batch.predicted == 2 + 2
