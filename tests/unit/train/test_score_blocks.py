"""Blocks of scores are computed one by one, found again, and never those of anything else; a
preference run reads its reference from them."""

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

from shardwright.data import score_digests
from shardwright.data.dataset import Dataset
from shardwright.data.sequences import (
    ArraySequences,
    EpochSampler,
    GroupedSequences,
    SequenceBatch,
)
from shardwright.diagnostics import Refusal
from shardwright.recipe.objectives import ObjectiveSection
from shardwright.train import score_blocks
from shardwright.train.reference_scores import with_reference
from shardwright.train.score_blocks import ScoreBlocks
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

    def token_scores(self, rows: Any, top: int) -> torch.Tensor:
        if self.calls == self.killed_at:
            raise Killed
        self.calls += 1
        found = torch.zeros(rows.examples * rows.rows_per_example, LENGTH)
        for numbers, batch in zip(rows.numbers, rows, strict=True):
            for row, number in enumerate(np.repeat(numbers, 2)):
                if number >= 0:
                    found[2 * number + row % 2, 1:] = batch.input_ids[row, 1:] * self.value
        return found


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Four pairs a block.
    monkeypatch.setattr(score_blocks, "BLOCK_VALUES", 4 * 2 * LENGTH)
    monkeypatch.setattr(score_digests, "_data_digest", lambda *_: "digest")
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
        ranks=[SimpleNamespace(data=0)],
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
    data = dataset()
    blocks = ScoreBlocks(made or planned(), folder, data, folder / "run" / "reference")
    computed = list(blocks.compute(trainer))  # type: ignore[arg-type]
    assert blocks.are_missing == bool(computed)
    return with_reference(data, blocks.finish)


def check(data: Dataset) -> None:
    """Each pair's scores are the sums of its labels' ids."""
    for rows in (data.train, data.validation):
        assert rows is not None
        indices = np.random.default_rng(3).permutation(len(rows))
        block = rows.read(indices)
        assert block.reference is not None
        assert block.reference.tolist() == block.tokens[:, 1:].sum(axis=1).tolist()


def test_scores_go_with_their_pairs(tmp_path: Path) -> None:
    trainer = Trainer()
    check(scored(tmp_path, trainer))
    assert trainer.calls == 3 + 1
    again = Trainer()
    check(scored(tmp_path, again))
    assert again.calls == 0, "they are found"


class PackedPairs:
    """Sequences of one pair or two, whose tokens are of 2 or 1 a completion."""

    def __len__(self) -> int:
        return PAIRS

    def read(self, indices: np.ndarray) -> SequenceBatch:
        numbers = np.where(indices[:, None] % 2 == 0, np.arange(4) // 2, np.arange(4))
        tokens = 4 * indices[:, None] + np.arange(4)
        starts = np.diff(numbers, axis=1, prepend=-1) > 0
        labels = np.ones((len(indices), 4), dtype=np.bool_)
        return SequenceBatch(tokens=tokens, starts=starts, loss_mask=labels, completions=numbers)


def test_scores_of_packed_pairs_are_of_each_completion(tmp_path: Path) -> None:
    made = planned()
    made.data = part("preference", "pairs.jsonl", packing=True)
    made.training = replace(made.training, objective=replace(made.training.objective, packed=True))
    order = EpochSampler(PAIRS, 2, 1, shuffle=False)
    data = Dataset(train=PackedPairs(), order=order, parts=(PAIRS,), validation=None, steps=1)
    blocks = ScoreBlocks(made, tmp_path, data, tmp_path / "reference", block_examples=4)
    assert len(list(blocks.compute(PackedTrainer()))) == 3  # type: ignore[arg-type]
    found = with_reference(data, blocks.finish)
    block = found.train.read(np.asarray([9, 2, 3]))
    # First tokens are no labels: completions of one token have none.
    wanted = [0.0] * 4 + [9.0, 11.0] + [0.0] * 4
    assert block.reference is not None and block.reference.tolist() == wanted


class PackedTrainer:
    """Scores a token by its id."""

    def token_scores(self, rows: Any, top: int) -> torch.Tensor:
        found = torch.zeros(rows.examples, LENGTH)
        for numbers, batch in zip(rows.numbers, rows, strict=True):
            for row, number in enumerate(numbers):
                if number >= 0:
                    found[number] = batch.input_ids[row]
        return found


def test_an_interruption_loses_one_block(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        scored(tmp_path, Trainer(killed_at=2))
    rest = Trainer()
    check(scored(tmp_path, rest))
    assert rest.calls == 2


@pytest.mark.parametrize("left", [b"", b"half of a file"])
def test_a_damaged_file_is_computed_again(left: bytes, tmp_path: Path) -> None:
    scored(tmp_path, Trainer())
    damaged = sorted(tmp_path.glob("run/reference/*/train-*.safetensors"))[1]
    damaged.write_bytes(left)
    rest = Trainer()
    check(scored(tmp_path, rest))
    assert rest.calls == 1


def test_scores_of_other_weights_data_or_lengths_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(tmp_path, Trainer())
    with monkeypatch.context() as other_data:
        other_data.setattr(score_digests, "_data_digest", lambda *_: "another")
        other = Trainer()
        scored(tmp_path, other)
        assert other.calls == 4
    for changed in (planned(seed=8), planned(precision="bf16")):
        other = Trainer()
        scored(tmp_path, other, changed)
        assert other.calls == 4
    changed = planned()
    changed.model = SimpleNamespace(config_hash="c", weights_path=str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    for name, content in (
        ("model.safetensors", b"one"),
        ("model.safetensors", b"two"),
        ("config.json", b"{}"),
    ):
        (tmp_path / "weights" / name).write_bytes(content)
        other = Trainer()
        scored(tmp_path, other, changed)
        assert other.calls == 4, content


def test_a_score_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        scored(tmp_path, Trainer(value=math.inf))
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW6273" and "example 1 of train" in diagnostic.message
    assert not list(tmp_path.glob("run/reference/*/*.safetensors"))
