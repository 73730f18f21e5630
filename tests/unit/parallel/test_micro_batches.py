"""Batches: the share of each data rank, labels and positions, and the held-out rows, each once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.data.dataset import Dataset
from shardwright.data.sequences import ArraySequences, EpochSampler, Indices, SequenceBatch
from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches
from shardwright.recipe.literal_types import Schedule
from shardwright.recipe.objectives import PLAIN_OBJECTIVE, ObjectiveSection
from tests.unit.data.data_plans import part


def plan(
    *,
    data: int = 2,
    micro: int = 2,
    accumulation: int = 3,
    schedule: Schedule = "1f1b",
    packing: bool = False,
) -> Any:
    return SimpleNamespace(
        data=part("text", packing=packing),
        validation=None,
        outer=None,
        island=0,
        training=SimpleNamespace(
            global_batch_size=data * micro * accumulation, objective=PLAIN_OBJECTIVE
        ),
        strategy=SimpleNamespace(
            data=data,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            pipeline_schedule=PIPELINE_SCHEDULES[schedule],
            pipeline=2,
            virtual_stages=1,
        ),
    )


def dataset(n: int, *, shuffle: bool = False) -> Dataset:
    rows = ArraySequences(np.arange(n * 4, dtype=np.int32).reshape(n, 4))
    return Dataset(
        train=rows,
        order=EpochSampler(n, 12, 3, shuffle=shuffle),
        parts=(n,),
        validation=None,
        steps=9,
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_ranks_share_out_the_global_batch(shuffle: bool) -> None:
    batches = TrainingBatches(plan(), dataset(30, shuffle=shuffle))
    for step in (1, 2, 3, 7):
        seen = [m.input_ids for rank in (0, 1) for m in batches.micro_batches(step, rank)]
        assert torch.cat(seen)[:, 0].div(4).sort().values.tolist() == sorted(
            batches.data.order.indices(step).tolist()
        )


def test_micro_batch_m_of_a_rank() -> None:
    """Rows [(m * data + rank) * B, ... + B): a run with as many data ranks and larger micro-batches
    sees others, and one that is resumed the same."""
    batches = TrainingBatches(plan(), dataset(24))
    rows = [
        [(m.input_ids[:, 0] // 4).tolist() for m in batches.micro_batches(2, rank)]
        for rank in (0, 1)
    ]
    assert rows == [[[12, 13], [16, 17], [20, 21]], [[14, 15], [18, 19], [22, 23]]]


class Strict(ArraySequences):
    def read(self, indices: Indices) -> SequenceBatch:
        assert indices.min() >= 0, "what only fills a batch up is a row, too"
        return super().read(indices)


def test_rows_that_fill_a_batch_up_are_there() -> None:
    rows = Strict(np.arange(20).reshape(5, 4))
    shares = [list(ValidationBatches(plan(), rows, rank)) for rank in (0, 1)]
    assert sum(m.predicted for share in shares for m in share) == 5 * 3


class OneBlock:
    """The same rows whatever is asked for."""

    def __init__(self, block: SequenceBatch) -> None:
        self.block = block

    def __len__(self) -> int:
        return len(self.block.tokens)

    def read(self, indices: Indices) -> SequenceBatch:
        return self.block


def test_packing_restarts_positions_and_drops_first_labels() -> None:
    block = SequenceBatch(
        tokens=np.array([[5, 6, 7, 8], [1, 2, 3, 4]]),
        starts=np.array([[False, False, True, False], [True, True, False, False]]),
        loss_mask=np.array([[True, True, True, True], [True, True, True, False]]),
    )
    data = Dataset(
        train=OneBlock(block),
        order=EpochSampler(2, 2, 0, shuffle=False),
        parts=(2,),
        validation=None,
        steps=1,
    )
    batch = TrainingBatches(
        plan(data=1, micro=2, accumulation=1, packing=True), data
    ).micro_batches(1, 0)[0]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]
    assert batch.labels.tolist() == [[5, 6, -100, 8], [-100, -100, 3, -100]]
    assert batch.predicted == 2 + 1


PAIRS = SequenceBatch(
    tokens=np.arange(24).reshape(3, 8),
    starts=np.array([[c in "|" for c in row] for row in ("| | | |.", "|  |    ", "|   |  |")]),
    loss_mask=np.ones((3, 8), dtype=np.bool_),
    completions=np.array(
        [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
    ),
    reference=np.arange(8.0),
)
"""Four completions, two and two; the last sequence ends with padding."""


def preference_plan(**more: Any) -> Any:
    made = plan(data=1, micro=3, accumulation=1, **more)
    objective = ObjectiveSection(name="dpo", beta=0.1, packed=True)
    made.training = SimpleNamespace(global_batch_size=3, objective=objective)
    made.data = part("preference", packing=True)
    return made


def test_completions_of_packed_pairs_are_numbered_through_a_micro_batch() -> None:
    data = Dataset(
        train=OneBlock(PAIRS),
        order=EpochSampler(3, 3, 0, shuffle=False),
        parts=(3,),
        validation=None,
        steps=1,
    )
    [batch] = TrainingBatches(preference_plan(), data).micro_batches(1, 0)
    assert batch.completions is not None and batch.tokens is not None
    numbers = [[0, 0, 1, 1, 2, 2, 3, 3], [4, 4, 4, 5, 5, 5, 5, 5], [6, 6, 6, 6, 7, 7, 7, 7]]
    assert batch.completions.tolist() == numbers
    assert batch.tokens.tolist() == [1, 1, 1, 1, 2, 4, 3, 2], "none of a completion's first token"
    assert batch.predicted == 4
    read = batch.labels_and_scores()
    assert [len(x) for x in read] == [3, 8, 3, 8], "labels, tokens, completions and reference"


def test_packed_pairs_that_fill_a_batch_up_do_not_count() -> None:
    [batch] = ValidationBatches(preference_plan(), PairsInTwo(PAIRS), 0)
    assert batch.tokens is not None and batch.tokens.tolist() == [1, 1, 1, 1, 2, 4, 0, 0]
    assert batch.predicted == 3


class PairsInTwo(OneBlock):
    """Two examples, of which a micro-batch of three reads one twice."""

    def __len__(self) -> int:
        return 2


def test_rows_without_documents_have_positions_where_others_have_them() -> None:
    """What crosses pipeline stages keeps its form from one micro-batch to the next."""
    batch = TrainingBatches(plan(packing=True), dataset(30)).micro_batches(1, 0)[0]
    assert batch.position_ids is not None and batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.predicted == 6


@pytest.mark.parametrize(
    ("count", "schedule", "batches"),
    [
        (5, "1f1b", 2),
        (8, "1f1b", 2),
        (5, "dualpipev", 4),
        (16, "dualpipev", 4),
        (17, "dualpipev", 8),
    ],
)
def test_held_out_rows_are_evaluated_once_each(
    count: int, schedule: Schedule, batches: int
) -> None:
    """DualPipeV takes the accumulation's number of micro-batches at once."""
    rows = ArraySequences(np.arange(count * 4).reshape(count, 4))
    shares = [
        ValidationBatches(plan(schedule=schedule, accumulation=4), rows, rank) for rank in (0, 1)
    ]
    assert [len(share) for share in shares] == [batches, batches]
    assert [share.at_once for share in shares] == [4 if schedule == "dualpipev" else batches] * 2
    labelled = [
        row for share in shares for m in share for row in m.labels.tolist() if row != [-100] * 4
    ]
    assert sorted(row[0] // 4 for row in labelled) == list(range(count))
    assert sum(share.predicted for share in shares) == count * 3


class Looking:
    """In the place of a processor: which rows it was shown, and on which thread."""

    blank: dict[str, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def inputs(
        self, tokens: np.ndarray, trained: object, pictures: object
    ) -> dict[str, torch.Tensor]:
        self.seen.append((int(tokens[0, 0]) // 4, threading.current_thread().name))
        return {"pixel_values": torch.from_numpy(tokens[:, :1].astype(np.float32))}


def test_pictures_of_the_next_step_are_made_ready_beside_this_one() -> None:
    processor, data = Looking(), dataset(30)
    batches, plain = TrainingBatches(plan(), data, processor), TrainingBatches(plan(), data)  # type: ignore[arg-type]
    for step in (1, 2, 3, 7, 9):  # a resumed run begins anywhere
        found, wanted = (b.micro_batches(step, 1) for b in (batches, plain))
        assert [m.input_ids.tolist() for m in found] == [m.input_ids.tolist() for m in wanted]
        assert all(m.beside is not None for m in found)
    batches._thread.shutdown()  # type: ignore[union-attr]
    ahead = [row for row, thread in processor.seen if thread.startswith("batches")]
    # Three micro-batches a step: 2, 3, 4 and 8 were made ahead (4 and 8 for nothing), of step 10
    # nothing.
    assert len(ahead) == 12 and len(processor.seen) == 12 + 3 * 3


def test_a_failure_ahead_is_told_in_its_step() -> None:
    class DamagedImage(Looking):
        def inputs(
            self, tokens: np.ndarray, trained: object, pictures: object
        ) -> dict[str, torch.Tensor]:
            if tokens[0, 0] >= 4 * 12:
                raise ValueError("damaged")
            return super().inputs(tokens, trained, pictures)

    batches = TrainingBatches(plan(), dataset(30), DamagedImage())  # type: ignore[arg-type]
    assert len(batches.micro_batches(1, 0)) == 3
    with pytest.raises(ValueError, match="damaged"):
        batches.micro_batches(2, 0)
