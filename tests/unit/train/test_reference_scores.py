"""Scores of the reference: computed block by block, found again, and never those of anything
else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from shardwright.data.dataset import Dataset
from shardwright.data.sequences import ArraySequences, EpochSampler, GroupedSequences
from shardwright.diagnostics import Refusal
from shardwright.recipe.objectives import ObjectiveSection
from shardwright.train import reference_scores
from shardwright.train.reference_scores import ReferenceScores
from tests.unit.data.data_plans import part, plan

PAIRS, HELD_OUT, LENGTH = 11, 3, 4


class Killed(Exception):
    pass


@dataclass
class Trainer:
    """Scores a token by its id; is killed before a block."""

    killed_at: int = -1
    calls: int = 0
    value: float = 1.0

    def token_scores(self, rows: Any) -> torch.Tensor:
        if self.calls == self.killed_at:
            raise Killed
        self.calls += 1
        found = torch.zeros(rows.examples * rows.rows_per_example, LENGTH)
        for numbers, batch in zip(rows.numbers, rows, strict=True):
            for row, number in enumerate(np.repeat(numbers, 2)):
                if number >= 0:
                    found[2 * number + row % 2] = batch.input_ids[row] * self.value
        return found


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    # Four pairs a block.
    monkeypatch.setattr(reference_scores, "BLOCK_TOKENS", 4 * 2 * LENGTH)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def planned(**training: Any) -> Any:
    made = plan(part("preference", "pairs.jsonl"), length=LENGTH)
    objective = ObjectiveSection(name="dpo", beta=0.1, label_smoothing=0.0)
    strategy = SimpleNamespace(
        data=1,
        micro_batch_size=2,
        virtual_stages=1,
        pipeline=1,
        pipeline_schedule=SimpleNamespace(groups_messages=False),
    )
    model = SimpleNamespace(config_hash="c", weights_path=None)
    return SimpleNamespace(
        data=made.data,
        validation=None,
        training=replace(made.training, objective=objective, **training),
        strategy=strategy,
        model=model,
        low_precision=None,
    )


def dataset() -> Dataset:
    ids = np.arange(2 * (PAIRS + HELD_OUT) * LENGTH).reshape(-1, LENGTH)
    train, held_out = (
        GroupedSequences(ArraySequences(rows), 2) for rows in (ids[: 2 * PAIRS], ids[2 * PAIRS :])
    )
    order = EpochSampler(PAIRS, 2, 1, shuffle=False)
    return Dataset(train=train, order=order, parts=(PAIRS,), validation=held_out, steps=1)


def scored(folder: Path, trainer: Trainer, made: Any = None) -> Dataset:
    found = ReferenceScores(made or planned(), folder, dataset(), {"pairs.jsonl": "digest"})
    if found.are_missing:
        found.compute(trainer, 0)  # type: ignore[arg-type]
    return found.with_scores()


def check(data: Dataset) -> None:
    """Each pair's scores are the sums of its rows' ids."""
    for rows in (data.train, data.validation):
        assert rows is not None
        indices = np.random.default_rng(3).permutation(len(rows))
        block = rows.read(indices)
        assert block.reference is not None
        assert block.reference.tolist() == block.tokens.sum(axis=1).tolist()


def test_scores_go_with_their_pairs(tmp_path: Path) -> None:
    trainer = Trainer()
    check(scored(tmp_path, trainer))
    assert trainer.calls == 3 + 1
    again = Trainer()
    check(scored(tmp_path, again))
    assert again.calls == 0, "they are found"


def test_an_interruption_loses_one_block(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        scored(tmp_path, Trainer(killed_at=2))
    rest = Trainer()
    check(scored(tmp_path, rest))
    assert rest.calls == 2


@pytest.mark.parametrize("left", [b"", b"half of a file"])
def test_a_damaged_file_is_computed_again(left: bytes, tmp_path: Path) -> None:
    scored(tmp_path, Trainer())
    damaged = sorted(tmp_path.glob("run/reference/*/train-*.npy"))[1]
    damaged.write_bytes(left)
    rest = Trainer()
    check(scored(tmp_path, rest))
    assert rest.calls == 1


def test_scores_of_other_weights_or_lengths_are_not_read(tmp_path: Path) -> None:
    scored(tmp_path, Trainer())
    for changed in (planned(seed=8), planned(precision="bf16")):
        other = Trainer()
        scored(tmp_path, other, changed)
        assert other.calls == 4
    changed = planned()
    changed.model = SimpleNamespace(config_hash="c", weights_path=str(tmp_path / "weights"))
    for content in (b"one", b"two"):
        (tmp_path / "weights").mkdir(exist_ok=True)
        (tmp_path / "weights" / "model.safetensors").write_bytes(content)
        other = Trainer()
        scored(tmp_path, other, changed)
        assert other.calls == 4, content


def test_a_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        scored(tmp_path, Trainer(value=math.inf))
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW6264" and "number 1 of train" in diagnostic.message
    assert not list(tmp_path.glob("run/reference/*/*.npy"))
